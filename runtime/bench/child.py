"""The process of one measurement: `python -m edge_run.runtime.bench.child`.

The request comes on standard input as a line of JSON; when that input ends, so does this process. The answer on
standard output is `ok` and a `Measurement`, or `error` and what to raise, each on a line of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_run.base.bench import Measurement
    from edge_run.base.config import ModelConfig


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.buffer.readline().decode("utf-8", "surrogateescape"))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if request["group"]:  # first of all: what is allocated from here on counts
        (Path(request["group"]) / "cgroup.procs").write_text(str(os.getpid()))
    from edge_run.base.config import ModelConfig
    from edge_run.base.error_codes import error_document
    from edge_run.base.errors import EdgeRunError
    from edge_run.base.results import to_json

    fields = request["config"]
    fields["cache_folder"] = fields["cache_folder"] and Path(fields["cache_folder"])
    try:
        config = ModelConfig(**fields)
        measured = measure(Path(request["path"]), config, request["prompt"], request["predict"], request["limit_bytes"])
        answer, text = "ok", to_json(measured)
    except EdgeRunError as error:
        answer, text = "error", json.dumps(error_document(error))
    sys.stdout.write(f"{answer}\n{text}")
    sys.stdout.flush()
    os._exit(0)  # what is loaded need not be freed piece by piece


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)


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
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
    except (OSError, StopIteration):
        return None


if __name__ == "__main__":
    main()
