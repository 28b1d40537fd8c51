"""Engines with a part of the model on a GPU, at budgets from the smallest to all of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError
from edge_run.base.units import KIB, MIB
from edge_run.partition.placement import Placement
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.gpu import offload
from edge_run.runtime.gpu.devices import find_gpus
from edge_run.runtime.gpu.offload import Offload, plan_offload
from edge_run.tiers.gguf import read_gguf
from edge_run.tiers.stub import Stubs, outline_heads
from exactness import run

OPTIONS: dict[str, Any] = {
    "context_tokens": 256,
    "micro_batch_tokens": 32,
    "outputs_per_pass": 32,
    "threads": 1,
    "check_file": False,
}
CHUNK_BYTES = 16 * KIB
PREFILL, DECODE = 50, 6


def why_no_gpu() -> str:
    """Return why there is no GPU to test with; empty where there is one."""
    if find_gpus():
        return ""
    return "llama.cpp offers no GPU here: make test-vulkan builds one for Vulkan, which the processor can play"


def offloads(path: Path, steps: int, **options: Any) -> list[Offload]:
    """Return what lies on the GPU at `steps` budgets, from the smallest that works to one for everything."""
    gguf = read_gguf(path)

    def at(budget_bytes: int) -> Offload:
        config = ModelConfig(**{**OPTIONS, **options}, gpu_memory=budget_bytes)
        found = plan_offload(gguf, config, 1 << 40).model
        assert found
        return found

    least, most = smallest(path, **options), at(1 << 40).sizes.total_bytes
    budgets = [least + (most - least) * step // max(1, steps - 1) for step in range(steps)]
    return list({found.placement: found for found in map(at, budgets)}.values())


def smallest(path: Path, **options: Any) -> int:
    """Return the smallest budget that a refusal names."""
    try:
        plan_offload(read_gguf(path), ModelConfig(**{**OPTIONS, **options}, gpu_memory=1), 1 << 40)
    except BudgetError as error:
        return error.minimum_bytes
    raise AssertionError("one byte is enough")


def bytes_of(path: Path, placement: Placement, **options: Any) -> int:
    """Return what a placement takes of the GPU's memory."""
    gguf, config = read_gguf(path), ModelConfig(**{**OPTIONS, **options})
    wanted = offload.Offload(find_gpus()[0], 0, placement, offload._NO_SIZES, has_op_offload=bool(config.op_offload))
    with Stubs(gguf.shards, outline_heads(gguf)) as stubs:
        return offload._sizes(gguf, config, stubs, wanted).total_bytes


@contextmanager
def open_engine(path: Path, gpu_memory: int, memory: int | None = None, **options: Any) -> Iterator[Engine]:
    """An engine; memory 0 is the smallest budget that works."""
    memory_bytes = 40 * MIB if memory == 0 else memory
    config = {**OPTIONS, **options, "gpu_memory": gpu_memory}
    for _ in range(20):
        try:
            engine = Engine.open(path, ModelConfig(**config, memory=memory_bytes, chunk_bytes=CHUNK_BYTES))
            break
        except BudgetError as error:
            if memory != 0:
                raise
            memory_bytes = error.minimum_bytes
    else:
        raise AssertionError("every budget that was named as the smallest is too small")
    try:
        yield engine
    finally:
        engine.close()


def tokens_of(engine: Engine) -> list[int]:
    """Return a prompt, and what follows it."""
    return np.random.default_rng(0).integers(1, engine.model.vocabulary, PREFILL + DECODE).tolist()


def logits_of(engine: Engine) -> list[np.ndarray]:
    """Return the logits of a prompt in several passes, and of some tokens after it."""
    return run(engine, tokens_of(engine), PREFILL)


def differing(wanted: list[np.ndarray], found: list[np.ndarray]) -> int:
    """Return how many passes have other logits."""
    return sum(not np.array_equal(a, b) for a, b in zip(wanted, found, strict=True))
