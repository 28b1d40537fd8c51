"""One measured run of a mixture of experts in a process of its own: reads a text, token after token, and prints JSON.

The text is held-out English, the same in every run: what is measured does not hang on what the model would say.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from _box import NOVELS
from _usage import read_bytes

from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.devices.host.memory import process_memory
from edge_run.prefetch.routes import DECODE, RouteWriter
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.streaming.experts import ExpertStreaming
from edge_run.runtime.streaming.route_recorder import RouteRecorder, route_header
from edge_run.tiers.gguf import read_gguf


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="edge-run")
    parser.add_argument("--memory", default="1024GiB")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--decode", type=int, default=40)
    parser.add_argument("--skip", type=int, default=200_000, help="characters of the text before the prompt")
    parser.add_argument("--prefetch", default="auto")
    parser.add_argument("--policy", default="default")
    parser.add_argument("--packed", default="off", help="a packed file of the model")
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--no-cache", action="store_true", help="keep no expert from one token to the next")
    parser.add_argument("--trace", type=Path, help="write down here what the routers choose")
    arguments = parser.parse_args()
    config = ModelConfig(
        memory=None if arguments.backend == "llama.cpp" else arguments.memory,
        context_tokens=arguments.context,
        threads=arguments.threads,
        micro_batch_tokens=arguments.micro_batch,
        backend=arguments.backend,
        readers=arguments.readers,
        expert_policy=arguments.policy,
        expert_prefetch=arguments.prefetch,
        packed=arguments.packed,
    )
    with arguments.trace.open("w") if arguments.trace else nullcontext() as file:
        header = route_header(read_gguf(arguments.model))
        recorder = RouteRecorder(header, RouteWriter(file, header)) if file else None
        print(json.dumps(measure(arguments, Engine.open(arguments.model, config, recorder=recorder), recorder)))


def measure(arguments: argparse.Namespace, engine: Engine, recorder: RouteRecorder | None) -> dict[str, object]:
    """Return the figures."""
    text = NOVELS.read_text()[arguments.skip : arguments.skip + 20_000]
    tokens = ggml.tokenize(engine.model.vocab, text, False, False)[: arguments.prompt + arguments.decode]
    if arguments.no_cache:
        keep_nothing(engine)
    callbacks = timed_callbacks(engine)
    started = time.monotonic()
    prompt = tokens[: arguments.prompt]
    engine.decoder.decode([BatchToken(t, i, 0, i == len(prompt) - 1) for i, t in enumerate(prompt)])
    first_token_s = time.monotonic() - started
    if recorder:
        recorder.phase = DECODE
    before, totals, waited, called, times, chosen = (
        read_bytes(),
        engine.read_totals,
        engine.wait_s,
        callbacks[0],
        [],
        [],
    )
    for position in range(arguments.prompt, len(tokens)):
        started = time.monotonic()
        logits = engine.decoder.decode([BatchToken(tokens[position], position, 0, True)])
        times.append(time.monotonic() - started)
        chosen.append(int(logits[0].argmax()))
    reading, waited_s = engine.read_totals.since(totals), engine.wait_s - waited
    return {
        "mode": engine.plan.mode,
        "expert_bytes": engine.plan.expert_bytes,
        "first_token_s": first_token_s,
        "token_s": statistics.mean(times),
        "bytes_per_token": (read_bytes() - before) / len(times),
        "wait_s_per_token": waited_s / len(times),
        "python_s_per_token": (callbacks[0] - called - waited_s) / len(times),
        "reader_cpu_s_per_gb": reading.cpu_s / max(1, reading.bytes_read) * 1e9,
        "peak_bytes": process_memory().peak_bytes,
        "swapped_bytes": process_memory().swapped_bytes,
        "experts": dataclasses.asdict(engine.expert_use) if engine.expert_use else None,
        "chosen": chosen,
    }


def keep_nothing(engine: Engine) -> None:
    """Let the expert cache of `engine` have no room."""
    (cache,) = (stream._cache for stream in engine._supplied.streams if isinstance(stream, ExpertStreaming))
    real: Any = cache.resize
    cache.resize = lambda capacity: real(0)  # type: ignore[method-assign]


def timed_callbacks(engine: Engine) -> list[float]:
    """Return a sum of the seconds that are spent in the callbacks of `engine` from now on."""
    spent = [0.0]

    def timed(function: Callable[[int], bool]) -> Callable[[int], bool]:
        def call(address: int) -> bool:
            started = time.monotonic()
            try:
                return function(address)
            finally:
                spent[0] += time.monotonic() - started

        return call

    driver: Any = engine._loaded.driver
    driver._ask, driver._told = timed(driver._ask), timed(driver._told)
    return spent


if __name__ == "__main__":
    main()
