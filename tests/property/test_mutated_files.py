"""Broken model files, one after another in one process: each is refused in one line, or runs as llama.cpp runs it.

The changes are those of `benchmarks/fuzz.py`, which tries hundreds; here are a few, the same ones every time.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fuzz_worker import Worker
from kit_models import KIT
from mutations import mutate, mutate_shards
from tiny_models import make_model, split_model

EXAMPLES = 40
SETTINGS = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SEEDS = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutated")


@pytest.fixture(scope="module")
def workers(folder: Path) -> Iterator[tuple[Worker, Worker]]:
    """One process for our runs and one for llama.cpp's own; the first must live through everything."""
    ours, theirs = Worker(folder / "cache", "edge-run"), Worker(folder / "cache", "llama.cpp")
    yield ours, theirs
    ours.close()
    theirs.close()
    assert ours.starts == 1


@pytest.fixture(scope="module")
def models(folder: Path) -> list[Path]:
    return [KIT, *(make_model(name, folder) for name in ("llama", "qwen3moe", "gpt2", "mamba2"))]


@pytest.fixture(scope="module")
def splits(folder: Path) -> list[list[Path]]:
    return [split_model(make_model("llama", folder, seed=seed), 3, folder) for seed in (0, 1)]


def check(path: Path, told: str, workers: tuple[Worker, Worker]) -> str:
    """Return what became of a file."""
    ours, theirs = workers
    result = ours.ask(path)
    assert result["outcome"] in ("refused", "ran"), (told, result)
    if result["outcome"] == "ran":
        expected: dict[str, Any] = theirs.ask(path)
        assert result["tokens"] == expected.get("tokens"), (told, result, expected)
    return "taken" if result["outcome"] == "ran" else "refused"


@SETTINGS
@given(seed=SEEDS)
def test_a_file_with_one_thing_broken(
    seed: int, folder: Path, models: list[Path], workers: tuple[Worker, Worker], outcomes: Counter[str]
) -> None:
    chance = random.Random(seed)
    path = folder / "broken.gguf"
    outcomes[check(path, mutate(chance.choice(models), path, chance), workers)] += 1


@SETTINGS
@given(seed=SEEDS)
def test_shards_with_one_thing_broken(
    seed: int, folder: Path, splits: list[list[Path]], workers: tuple[Worker, Worker], outcomes: Counter[str]
) -> None:
    broken = folder / "shards"
    broken.mkdir()
    try:
        told = mutate_shards(splits[0], splits[1], broken, random.Random(seed))
        outcomes[check(broken / splits[0][0].name, told, workers)] += 1
    finally:
        shutil.rmtree(broken)
