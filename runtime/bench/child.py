"""The process of one measurement, which `cold_run.py` starts.

Its answer is a `Measurement`, or an error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_run.runtime.processes.child_answer import give_answer, take_request

if TYPE_CHECKING:
    from edge_run.base.bench import Measurement
    from edge_run.base.config import ModelConfig


def main() -> None:
    """Answer one request."""
    request = take_request()
    if request["group"]:  # first of all: what is allocated from here on counts
        (Path(request["group"]) / "cgroup.procs").write_text(str(os.getpid()))
    from edge_run.base.config import ModelConfig
    from edge_run.base.strict_json import to_json

    fields = request["config"]
    fields["cache_folder"] = fields["cache_folder"] and Path(fields["cache_folder"])

    def answer() -> str:
        config, path = ModelConfig(**fields), Path(request["path"])
        return to_json(measure(path, config, request["prompt"], request["predict"], request["limit_bytes"]))

    give_answer(answer, request["flags"])


def measure(
    path: Path, config: ModelConfig, prompt: Sequence[int], predict_tokens: int, limit_bytes: int
) -> Measurement:
    """Open the model at `path`, feed it `prompt`, and let it choose `predict_tokens` tokens, always the likeliest."""
    from edge_run.base.bench import OURS, Measurement
    from edge_run.devices.host.memory import process_memory
    from edge_run.runtime.decoding.session import Session
    from edge_run.runtime.engine.engine import Engine
    from edge_run.runtime.generation.meter import Meter

    with contextlib.closing(Engine.open(path, config)) as engine:
        meter, session = Meter(engine), Session(engine.front)
        logits, _ = session.feed(prompt)
        tokens = [int(logits.argmax())]
        prefill, stored_before = meter.lap(), stored_bytes()
        while len(tokens) < predict_tokens:
            tokens.append(int(session.step(tokens[-1]).argmax()))
        decode, stored_after = meter.lap(), stored_bytes()
        is_ours, memory = engine.backend.name == OURS, process_memory()
        if is_ours:
            bytes_read: int | None = engine.read_totals.bytes_read
            decode_bytes: int | None = decode.reads.bytes_read
        else:
            bytes_read = stored_after
            decode_bytes = None if stored_after is None or stored_before is None else stored_after - stored_before
        return Measurement(
            backend=engine.backend.name,
            mode=engine.plan.mode,
            load_s=engine.load_s,
            first_token_s=prefill.wall_s,
            start_s=engine.load_s + prefill.wall_s,
            prefill_tokens_per_s=len(prompt) / prefill.wall_s,
            decode_tokens_per_s=(predict_tokens - 1) / decode.wall_s,
            bytes_per_token=None if decode_bytes is None else decode_bytes / (predict_tokens - 1),
            bytes_read=bytes_read,
            peak_bytes=memory.peak_bytes,
            swapped_bytes=memory.swapped_bytes,
            limit_bytes=limit_bytes,
            token_ids=tuple(tokens),
            numerics=engine.numerics,
            experts=engine.expert_use,
        )


def stored_bytes() -> int | None:
    """Return the bytes that storage has read for this process, page faults included; None where nobody counts."""
    from edge_run.devices.host.system_files import system_text

    lines = system_text(Path("/proc/self/io")).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes")), None)
