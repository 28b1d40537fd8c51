"""One predicted and measured run in a process of its own: says beforehand what it will take. Prints JSON.

Without --share the device is only probed, into the cache; with it, the prediction comes from there, before the model is
opened. What is not there, or not any more, is measured then, as `edge-run plan` does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from _box import NOVELS

from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.planning.plan import planner
from edge_run.runtime.probing.probe import probe, recall


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--share", type=float)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--decode", type=int, default=8)
    arguments = parser.parse_args()
    config = ModelConfig(
        context_tokens=arguments.context,
        micro_batch_tokens=arguments.micro_batch,
        threads=arguments.threads,
        cache_folder=arguments.cache,
    )
    if arguments.share is None:
        started = time.monotonic()
        probe([], arguments.model, config, is_fresh=True)
        print(json.dumps({"probe_s": time.monotonic() - started}))
        return
    planned = planner(arguments.model, config)
    known = recall(planned.gguf, config)  # figures that others disturbed are kept for minutes only
    profile = known or probe([], arguments.model, config)
    budget = int(arguments.model.stat().st_size * arguments.share)
    plan = planned.timed(planned.plan(budget), profile, arguments.prompt)
    assert plan.forecast is not None
    row = {f"predicted_{key}": value for key, value in dataclasses.asdict(plan.forecast).items()}
    row |= {"share": arguments.share, "budget_bytes": budget, "is_probed_again": known is None}
    row |= measure(arguments, dataclasses.replace(config, memory=budget))
    row["drive"] = row["read_bytes_per_s"] / profile.disks[0].bytes_per_s
    print(json.dumps(row))


def measure(arguments: argparse.Namespace, config: ModelConfig) -> dict[str, Any]:
    """Open the model, feed two prompts and decode; return the figures."""
    from edge_run.runtime.engine.engine import Engine
    from edge_run.runtime.llama import _ggml as ggml

    engine = Engine.open(arguments.model, config)
    n = arguments.prompt
    tokens = ggml.tokenize(engine.model.vocab, NOVELS.read_text()[:20_000], False, False)

    def feed(start: int) -> float:
        engine.decoder.rewind(0, 0)
        started = time.monotonic()
        engine.decoder.decode([BatchToken(tokens[start + i], i, 0, i + 1 == n) for i in range(n)])
        return time.monotonic() - started

    first_token_s, again_s = feed(0), feed(n)
    times = []
    before = engine.read_totals
    for i in range(arguments.decode + 1):
        started = time.monotonic()
        engine.decoder.decode([BatchToken(tokens[2 * n + i], n + i, 0, True)])
        times.append(time.monotonic() - started)
    after = engine.read_totals
    figures: dict[str, Any] = {
        "mode": engine.plan.mode,
        "load_s": engine.load_s,
        "first_token_s": first_token_s,
        "prefill_tokens_per_s": n / again_s,
        "decode_tokens_per_s": arguments.decode / sum(times[1:]),
        "read_bytes_per_s": (after.bytes_read - before.bytes_read) / max(1e-9, after.busy_s - before.busy_s),
        "peak_bytes": process_memory().peak_bytes,
    }
    engine.close()
    return figures


if __name__ == "__main__":
    main()
