"""How long a context is that was not asked for: what a plan says, and what a run then has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_run import ModelConfig
from edge_run.base.units import MIB
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.inspection.cache import inspect
from edge_run.runtime.llama.library import library_build
from edge_run.runtime.planning import prepare
from edge_run.runtime.planning.plan import planner
from edge_run.runtime.planning.usual_context import _sized
from edge_run.tiers._libc import PAGE
from edge_run.tiers.gguf import read_gguf
from in_child import in_child
from mutations import changed
from tiny_models import make_model

TRAINED = 131_072  # whose keys and values take 256 MiB


@pytest.fixture(scope="module")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    return changed(make_model("llama", folder), folder / "long.gguf", "llama.context_length", TRAINED)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is found out about the model, for all tests of it: each of them would find out much of the same."""
    return tmp_path_factory.mktemp("cache")


def planned(path: Path, cache: Path, **options: Any) -> int:
    return planner(path, ModelConfig(threads=1, cache_folder=cache, **options)).plan().context_tokens


def test_a_model_that_fits_gets_its_own_length_or_half_of_what_it_leaves(long_llama: Path, cache: Path) -> None:
    found = [planned(long_llama, cache, memory=f"{size}MiB") for size in (3000, 700, 400, 150)]
    assert found[0] == TRAINED
    assert found == sorted(found, reverse=True)
    assert len(set(found)) > 2
    assert found[-1] >= 4096


def test_other_lengths_are_asked_for(long_llama: Path, cache: Path) -> None:
    assert planned(long_llama, cache, memory="3GiB", context_tokens=512) == 512
    assert planned(long_llama, cache, memory="3GiB", context_tokens=0) == TRAINED


@pytest.mark.parametrize("options", [{"check_file": False}, {"backend": "llama.cpp"}])
def test_it_is_what_is_usual_where_nothing_is_known_or_lent(long_llama: Path, cache: Path, options: Any) -> None:
    assert planned(long_llama, cache, memory="3GiB", **options) == 4096


def test_and_where_the_kernel_charges_what_is_reserved(
    long_llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "charges_reserved", lambda: True)
    assert planned(long_llama, cache, memory="3GiB") == 4096


@in_child
def _runs(path: Path, cache: Path, draft: Path | None) -> None:
    options = {"memory": "900MiB", "draft": draft}
    engine = Engine.open(path, ModelConfig(threads=1, cache_folder=cache, **options))
    try:
        assert engine.plan.context_tokens == engine.context_tokens == planned(path, cache, **options) > 4096
        assert engine.plan.wanted_context_tokens == engine.plan.context_tokens, "nobody wanted more"
        if engine.draft:
            assert engine.draft.context_tokens == engine.context_tokens
    finally:
        engine.close()


@pytest.mark.parametrize("has_draft", [False, True])
def test_a_run_has_what_its_plan_said(long_llama: Path, cache: Path, has_draft: bool) -> None:
    _runs(path=long_llama, cache=cache, draft=long_llama if has_draft else None)


def test_a_draft_model_takes_of_what_there_is(long_llama: Path, cache: Path) -> None:
    """Its keys and values are as large as the model's own here; a context of one that was trained on less is short."""
    found = [planned(long_llama, cache, memory=f"{size}MiB", draft=long_llama) for size in (6000, 950, 500, 260)]
    assert found[0] == TRAINED
    assert found == sorted(found, reverse=True)
    assert len(set(found)) > 2
    assert found[-1] >= 4096
    alone = planned(long_llama, cache, memory="950MiB")
    assert found[1] < alone
    short = make_model("llama", long_llama.parent)
    assert found[1] <= planned(long_llama, cache, memory="950MiB", draft=short) <= alone


def test_the_factors_of_a_model_are_part_of_its_key(tmp_path: Path) -> None:
    """The short ones by default: trained on 1024 tokens, on 256 at first."""
    _factors(path=make_model("phi3", tmp_path), cache=tmp_path)


@in_child
def _factors(path: Path, cache: Path) -> None:
    def found(**options: Any) -> tuple[int, str]:
        engine = Engine.open(path, ModelConfig(threads=1, memory=500 * MIB, cache_folder=cache, **options))
        try:
            return engine.context_tokens, engine.numerics.rope_factors
        finally:
            engine.close()

    assert found() == (256, "short")
    assert found(context_tokens=512) == (512, "long")
    assert found(context_tokens=512, sequences=2, exact=True) == (512, "short"), "each text has half of it"


def test_what_a_length_between_two_others_takes_where_layers_have_a_window(tmp_path: Path) -> None:
    """The shorter context is no longer than the window's ring, so that nothing is seen of it there."""
    gguf = read_gguf(make_model("gemma3", tmp_path))
    short, between, long = (
        inspect(gguf, ModelConfig(context_tokens=n, micro_batch_tokens=16, cache_folder=tmp_path), library_build())
        for n in (256, 1024, 4096)
    )
    found = _sized(short, long, 1024)
    assert [tensor.n_cells for tensor in found.cells.tensors] == [tensor.n_cells for tensor in between.cells.tensors]
    for n_cells in (64, 512, 1024):
        least, most = sorted((found.cells.bytes_for(n_cells), between.cells.bytes_for(n_cells)))
        assert most - least <= PAGE * len(found.cells.tensors)
