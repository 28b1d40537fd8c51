"""One predicted and measured run with a part of a model on the GPU, in a process of its own. Prints JSON.

    python _gpu_parts_worker.py MODEL.gguf --cache FOLDER [--gpu-memory BYTES] [--memory BYTES]

Without --gpu-memory the device is only probed, into the cache; with it, the prediction comes from there, before the
model is opened. --memory 0 is the smallest that works.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError
from edge_run.base.protocols import BatchToken
from edge_run.base.units import MIB
from edge_run.devices.host.machine import compute_threads
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.gpu.devices import find_gpus
from edge_run.runtime.planning.plan import planner
from edge_run.runtime.probing.probe import probe, recall

WARM, TRIES = 2, 20
LEAST = 64 * MIB


def main() -> None:
    """Run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--gpu-memory", type=int)
    parser.add_argument("--memory", type=int)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=32)
    arguments = parser.parse_args()
    gpu_memory = arguments.gpu_memory if arguments.gpu_memory is not None else arguments.model.stat().st_size // 2
    config = ModelConfig(
        context_tokens=arguments.context,
        micro_batch_tokens=512,
        gpu_memory=gpu_memory,
        memory=LEAST if arguments.memory == 0 else arguments.memory,
        cache_folder=arguments.cache,
    )
    if arguments.gpu_memory is None:
        started = time.monotonic()
        profile = probe([], arguments.model, config, is_fresh=True)
        gpu, kernels = dataclasses.asdict(profile.gpus[0]), [dataclasses.asdict(one) for one in profile.kernels]
        print(json.dumps({"probe_s": time.monotonic() - started, "gpu": gpu, "kernels": kernels}))
        return
    free_before = find_gpus()[0].free_bytes
    engine, config = opened(arguments.model, config)
    planned = planner(arguments.model, config)
    profile = recall(planned.gguf, config)
    assert profile is not None, "not probed"
    forecast = planned.timed(planned.plan(), profile, arguments.prompt).forecast
    assert forecast is not None
    row = {f"predicted_{key}": value for key, value in dataclasses.asdict(forecast).items()}
    print(json.dumps(row | measured(engine, arguments.prompt, arguments.decode, free_before)))


def opened(model: Path, config: ModelConfig) -> tuple[Engine, ModelConfig]:
    """Open `model`; with `LEAST` in the smallest budget that works. Returns the engine and what it was opened with."""
    asked = config
    for _ in range(TRIES):
        try:
            return Engine.open(model, asked), asked
        except BudgetError as error:
            if config.memory != LEAST:
                raise
            asked = dataclasses.replace(asked, memory=error.minimum_bytes)
    raise AssertionError("every budget that was named as the smallest is too small")


def measured(engine: Engine, prompt: int, decode: int, free_before: int) -> dict[str, Any]:
    """Feed a prompt twice and decode; return the figures. Closes the engine."""
    plan, gpu = engine.plan, engine.plan.gpu
    assert gpu is not None

    def feed() -> float:
        engine.decoder.rewind(0, 0)
        started = time.monotonic()
        engine.decoder.decode([BatchToken(5 + i % 97, i, 0, i + 1 == prompt) for i in range(prompt)])
        return time.monotonic() - started

    first_token_s, again_s = feed(), feed()
    times, token = [], 7
    for i in range(WARM + decode):
        started = time.monotonic()
        token = int(engine.decoder.decode([BatchToken(token, prompt + i, 0, True)])[0].argmax())
        times.append(time.monotonic() - started)
    figures: dict[str, Any] = {
        "mode": plan.mode,
        "layers": gpu.layers,
        "copies": gpu.op_offload,
        "load_s": engine.load_s,
        "first_token_s": first_token_s,
        "prompt_again_s": again_s,
        "token_s": statistics.median(times[WARM:]),
        "mean_token_s": statistics.fmean(times[WARM:]),
        "last_token": token,
        "threads": compute_threads(None),
        "gpu_budget": gpu.budget_bytes,
        "gpu_counted": gpu.weights_bytes + gpu.kv_bytes + gpu.buffer_bytes,
        "gpu_less_free": free_before - find_gpus()[0].free_bytes,
        "memory_budget": plan.budget_bytes,
        "memory_peak": process_memory().peak_bytes,
        "streamed_bytes": plan.streamed_bytes_per_pass,
    }
    engine.close()
    return figures


if __name__ == "__main__":
    main()
