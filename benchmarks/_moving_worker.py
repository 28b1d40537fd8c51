"""One run for `moving.py` in a process of its own: brings weights as passes would, computes nothing; prints JSON.

CPU seconds of the process: its own threads, and those that the kernel may start for it. The control group counts the
same.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_run.base.config import ModelConfig
from edge_run.runtime.decoding.driver import ONE_TOKEN
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.streaming.experts import ExpertStreaming
from edge_run.runtime.streaming.weights import WeightStreaming

WARM = 1.5  # of the model are read before: memory that is used for the first time is cleared, and sums are made


def in_order(stream: WeightStreaming, engine: Engine) -> Callable[[], None]:
    """Return what brings the weights of a pass in the order of the graph."""
    segments = stream.segments(engine._loaded.driver.programs[ONE_TOKEN].graph)

    def run() -> None:
        for segment in segments:
            stream.weights.acquire(segment.acquire)
            stream.weights.release(segment.release)

    return run


def by_expert(stream: ExpertStreaming, n_used: int) -> Callable[[], None]:
    """Return what brings experts that are chosen at random, layer by layer; those that came first go first."""
    weights, experts, draw = stream._weights, stream._experts, random.Random(1)
    held: dict[tuple[int, int], list[int]] = {}
    most = max(1, int(0.8 * weights.n_frames / max(experts.sizes)) - 2 * n_used)

    def run() -> None:
        for layer, tensors in enumerate(experts.layers):
            for expert in draw.sample(range(experts.n_experts), n_used):
                if (layer, expert) in held:
                    continue
                while len(held) >= most:
                    weights.release(held.pop(next(iter(held))))
                chunks = [chunk for tensor in tensors for chunk in experts.pieces(tensor)[expert]]
                held[layer, expert] = chunks
                weights.hold(chunks)
                weights.acquire(chunks)
                weights.release(chunks)

    return run


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", required=True)
    parser.add_argument("--packed", default="off")
    parser.add_argument("--repack", default="off")
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--gb", type=float, default=8.0)
    arguments = parser.parse_args()
    options: dict[str, Any] = {"context_tokens": 512, "micro_batch_tokens": 32, "threads": 1, "draft": None}
    config = ModelConfig(
        memory=arguments.memory,
        packed=arguments.packed,
        repack=arguments.repack,
        readers=arguments.readers,
        expert_prefetch="off",
        **options,
    )
    engine = Engine.open(arguments.model, config)
    streams = engine._supplied.streams
    if mixture := next((one for one in streams if isinstance(one, ExpertStreaming)), None):
        n_used = engine._loaded.prepared.gguf.value("expert_used_count")
        assert isinstance(n_used, int)
        run = by_expert(mixture, n_used)
    else:
        (dense,) = (one for one in streams if isinstance(one, WeightStreaming))
        run = in_order(dense, engine)
    while engine.read_totals.bytes_read < WARM * engine.plan.model_bytes:
        run()
    before, started_s, started_wall_s, passes = engine.read_totals, time.process_time(), time.monotonic(), 0
    while engine.read_totals.since(before).bytes_read < arguments.gb * 1e9:
        run()
        passes += 1
    cpu_s, wall_s, reads = (
        time.process_time() - started_s,
        time.monotonic() - started_wall_s,
        engine.read_totals.since(before),
    )
    share = engine._loaded.prepared.packed.share if engine._loaded.prepared.packed else 1.0
    figures = {
        "passes": passes,
        "bytes_read": reads.bytes_read,
        "gb_per_s": reads.bytes_read / wall_s / 1e9,
        "cpu_s_per_gb": cpu_s / (reads.bytes_read / share / 1e9),
        "reader_cpu_s_per_gb": reads.cpu_s / (reads.bytes_read / share / 1e9),
        "packed_share": share,
    }
    engine.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
