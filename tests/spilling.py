"""Engines whose context has no room in memory, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_run.base.config import ModelConfig
from edge_run.base.units import KIB, MIB
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.streaming.spilled_cells import SpilledCells
from edge_run.tiers.kv.spill import Spill
from exactness import open_at
from talks import OPTIONS


def open_spilling(path: Path, folder: Path, share: float = 0.5, by_expert: bool = False, **options: Any) -> Engine:
    """Open `path` in little memory, with a context that has no room in it."""
    settings = {**OPTIONS, "kv_spill": folder / "spill", **options}
    for part in (1, 1 / 4, 1 / 16):  # of some models the rest is small beside what a context takes
        engine = open_at(path, part * share, settings, by_expert, chunk_bytes=32 * KIB)
        if engine.plan.spilled_kv_bytes:
            return engine
        engine.close()
    raise AssertionError("no budget in which it streams has no room for the context")


def open_whole(path: Path, folder: Path, **options: Any) -> Engine:
    """Open `path` in little memory, with room for all of its context if what is complete is away."""
    shorter = open_spilling(path, folder, 0.05, **options)
    tokens = shorter.shape.context_tokens
    memory = shorter.budget_bytes + spilled_of(shorter).spill._shape.least_bytes(tokens) - shorter.plan.kv_bytes + MIB
    shorter.close()
    settings = {**OPTIONS, **options, "kv_spill": folder / "spill", "chunk_bytes": 32 * KIB}
    for _ in range(24):  # what the program takes differs a little from engine to engine
        engine = Engine.open(path, ModelConfig(memory=memory, **settings))
        if engine.plan.context_tokens == tokens and engine.plan.spilled_kv_bytes:
            return engine
        memory += -MIB // 2 if engine.plan.context_tokens == tokens else MIB
        engine.close()
    raise AssertionError("no budget has room for the context, but not for all of it in memory")


def spilled_of(engine: Engine) -> SpilledCells:
    """Return the feature that brings rows."""
    return next(feature for feature in engine._loaded.driver.features if isinstance(feature, SpilledCells))


def spill_of(engine: Engine) -> Spill:
    """Return what has its rows."""
    return spilled_of(engine).spill
