"""One model in a process of its own, for `forecast_context.py`: says how fast it will be while its context fills, then
measures that, and how long giving room takes. Without --memory the device is only probed. Prints JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from edge_run import plan
from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.base.units import parse_size
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.decoding.driver import PassShape
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.planning.plan import planner
from edge_run.runtime.probing.probe import probe, recall

SETTLING = 2


class TimedRoom:
    """How long what runs before each pass takes: it divides the room between weights, keys and values."""

    def __init__(self, engine: Engine) -> None:
        """Time the passes of `engine` from now on."""
        self._driver = engine._loaded.driver
        self._before_pass, self.seconds = self._driver.before_pass, list[float]()
        self._driver.before_pass = self._timed

    def _timed(self, shape: PassShape) -> None:
        started = time.monotonic()
        self._before_pass(shape)
        self.seconds.append(time.monotonic() - started)


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--memory", type=parse_size)
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--decode", type=int, default=10)
    parser.add_argument("--grow", type=int, default=300, help="tokens one by one from the start on, to see room given")
    arguments = parser.parse_args()
    config = ModelConfig(
        memory=arguments.memory, context_tokens=arguments.context, cache_folder=arguments.cache, backend="edge-run"
    )
    if not arguments.memory:
        probe([], arguments.model, config, is_fresh=True)
        print("{}")
        return
    profile = recall(planner(arguments.model, config).gguf, config)
    assert profile is not None, "not probed"
    planned = plan(arguments.model, profile=profile, config=config)
    engine = Engine.open(arguments.model, config)
    tokens = np.random.default_rng(0).integers(5, engine.model.vocabulary - 5, arguments.context).tolist()

    def decode(start: int, n_tokens: int) -> list[float]:
        times = []
        for i in range(start, start + n_tokens):
            started = time.monotonic()
            engine.decoder.decode([BatchToken(tokens[i], i, 0, True)])
            times.append(time.monotonic() - started)
        return times

    rows: list[dict[str, Any]] = []
    decode(0, 1)  # all that is read once
    room = TimedRoom(engine)
    decode(1, arguments.grow - 1)
    at = arguments.grow
    for point in planned.by_context:
        if point.tokens + arguments.decode > planned.context_tokens:
            break
        for start in range(at, point.tokens, engine.shape.micro_batch_tokens):
            stop = min(start + engine.shape.micro_batch_tokens, point.tokens)
            engine.decoder.place(tokens[start:stop], start, lambda node: None)
            at = stop
        before = engine.read_totals.bytes_read
        times = decode(at, arguments.decode)
        read = (engine.read_totals.bytes_read - before) / len(times)
        at += len(times)
        rows.append(
            dataclasses.asdict(point)
            | {"measured_tokens_per_s": 1 / statistics.mean(times[SETTLING:]), "measured_bytes": read}
        )
    peak_bytes = process_memory().peak_bytes
    engine.close()
    room_s = {"room_longest_s": max(room.seconds), "room_median_s": statistics.median(room.seconds)}
    print(json.dumps({"mode": planned.mode, "peak_bytes": peak_bytes, **room_s, "rows": rows}))


if __name__ == "__main__":
    main()
