"""One run for `kernels.py` in a process of its own: a model, its prompts and its tokens; prints JSON.

Of each step the seconds that went by, and those that the processor was at work, all threads together: on a machine that
others use too, these say more.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.engine.engine import Engine

WIDTH = 512


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="edge-run")
    parser.add_argument("--repack", default="auto")
    parser.add_argument("--packed", default="off", help="a file of repacked weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--decode", type=int, default=16)
    parser.add_argument("--memory")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 32])
    arguments = parser.parse_args()
    figures: dict[str, object] = {}

    def timed(name: str, step: Callable[[], object]) -> None:
        wall_s, cpu_s = time.monotonic(), time.process_time()
        step()
        figures[f"{name}_s"], figures[f"{name}_cpu_s"] = time.monotonic() - wall_s, time.process_time() - cpu_s

    started_s, started_cpu_s = time.monotonic(), time.process_time()
    engine = Engine.open(
        arguments.model,
        ModelConfig(
            memory=arguments.memory,
            context_tokens=max(arguments.prompts) + WIDTH,
            micro_batch_tokens=WIDTH,
            threads=arguments.threads,
            backend=arguments.backend,
            repack=arguments.repack,
            packed=arguments.packed,
        ),
    )
    decoder, vocabulary = engine.decoder, engine.model.vocabulary

    def feed(n_tokens: int) -> None:
        tokens = [BatchToken((7919 * i + 11) % vocabulary, i, 0, i == n_tokens - 1) for i in range(n_tokens)]
        for start in range(0, n_tokens, WIDTH):
            decoder.decode(tokens[start : start + WIDTH])

    def follow() -> None:
        for i in range(arguments.decode):
            rows = decoder.decode([BatchToken((104729 * i + 3) % vocabulary, arguments.prompts[-1] + i, 0, True)])
        figures["last_token"] = int(rows[-1].argmax())

    feed(1)
    figures |= {"open_s": time.monotonic() - started_s, "open_cpu_s": time.process_time() - started_cpu_s}
    for n_tokens in arguments.prompts:
        decoder.rewind(0, 0)
        timed(f"prompt_{n_tokens}", lambda n_tokens=n_tokens: feed(n_tokens))  # type: ignore[misc]
    timed("decode", follow)
    figures |= {
        "mode": engine.plan.mode,
        "repacked": engine.numerics.repacked,
        "read_repacked": engine.plan.read_repacked,
        "budget_bytes": engine.budget_bytes,
        "streamed_bytes_per_pass": engine.plan.streamed_bytes_per_pass,
        "peak_bytes": process_memory().peak_bytes,
    }
    engine.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
