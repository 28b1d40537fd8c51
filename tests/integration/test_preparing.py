"""One way to open: a run, a plan, a measurement and a worker are prepared alike, and a header is parsed once."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import edge_run
from edge_run import ModelConfig
from edge_run.base.errors import BudgetError
from edge_run.base.mesh import MeshOptions
from edge_run.base.units import GIB, KIB, MIB, format_size
from edge_run.cli.shared.answer import opened
from edge_run.cli.shared.terminal import Terminal
from edge_run.devices.host.ledger import Ledger
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.mesh import engine as mesh_engine
from edge_run.runtime.planning import prepare as prepare_module
from edge_run.runtime.planning.plan import planner
from edge_run.runtime.planning.prepare import prepare
from edge_run.runtime.probing import kernels
from edge_run.runtime.tools.pack import pack
from edge_run.tiers import gguf_header
from edge_run.tiers.gguf import read_gguf
from exactness import count_peak_from_here, open_at
from fake_mesh import Hub
from in_child import in_child
from kit_models import KIT
from mesh_runs import running
from tiny_models import make_model

OPTIONS: dict[str, Any] = {"context_tokens": 256, "micro_batch_tokens": 16, "threads": 1}
OF_ANY_BUDGET = ("kv", "buffers", "work", "reserve", "prediction", "packed")


@pytest.mark.parametrize("options", [{}, {"expert_prefetch": "off"}, {"expert_policy": "lru"}, {"packed": "off"}])
def test_the_plan_of_an_moe_has_the_lines_of_the_run(options: dict[str, str], folder: Path, tmp_path: Path) -> None:
    path = make_model("qwen3moe", folder)
    _compare_lines(path=path, options={**OPTIONS, **options, "cache_folder": tmp_path})


@in_child
def _compare_lines(path: Path, options: dict[str, Any]) -> None:
    engine = open_at(path, 0.3, options, by_expert=True)
    found = {item.what: item.size_bytes for item in engine.plan.items}
    engine.close()
    plans = planner(path, ModelConfig(**options, readers=engine.config.readers))
    least, whole = (plan.budget_bytes for plan in (plans.sweep()[0], plans.sweep()[-1]))
    tried = (plans.plan(budget) for budget in range(least, whole, 64 * KIB))
    lines = ({item.what: item.size_bytes for item in plan.items} for plan in tried if plan.expert_bytes)
    said = next((one for one in lines if one.keys() == found.keys()), None)
    assert said is not None, f"no plan by expert has the lines of the run: {set(found)}"
    differing = {what: (said.get(what), found.get(what)) for what in OF_ANY_BUDGET if said.get(what) != found.get(what)}
    assert not differing, f"planned and run: {differing}"


@pytest.mark.parametrize("available", [10 * MIB, 0, -GIB])
@pytest.mark.parametrize("memory", [4 * GIB, None])
def test_what_is_not_free_is_not_a_budget_that_is_too_small(
    memory: int | None, available: int, kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "default_budget_bytes", lambda promised_bytes: max(0, available) // 2)
    ledger, config = Ledger(tmp_path, lambda promised_bytes: available), ModelConfig(**OPTIONS, memory=memory)
    refusal = rf"{kit.name}: it needs at least .* {format_size(max(0, available))} is free for it; end other programs$"
    with pytest.raises(BudgetError, match=refusal) as caught:
        prepare(read_gguf(kit), config, ledger)
    assert caught.value.minimum_bytes > 10 * MIB


@in_child
def test_what_weighing_types_of_keys_takes_is_in_the_budget(tmp_path: Path) -> None:
    kernels.last_cache_bytes = lambda: GIB  # as of a large server
    path = make_model("llama", tmp_path)
    count_peak_from_here()
    options: dict[str, Any] = {"memory": 150 * MIB, "kv_type": "auto", "cache_folder": tmp_path / "cache"}
    engine = Engine.open(path, ModelConfig(**OPTIONS, **options))
    assert "q8_0" in engine.plan.kv_type_reason
    assert engine.memory_use.peak_bytes <= engine.budget_bytes == 150 * MIB
    engine.close()


def test_a_packed_file_is_in_the_plan_as_in_the_run(tmp_path: Path) -> None:
    path = make_model("qwen3moe", tmp_path, scale=4)  # so large that streaming by expert takes less than all of it
    pack(path)
    _compare_lines(path=path, options={**OPTIONS, "cache_folder": tmp_path / "cache"})


def test_the_plan_of_what_llama_cpp_is_to_load_promises_nothing(kit: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "cache_folder": tmp_path, "backend": "llama.cpp"}
    plan = edge_run.plan(kit, **options)
    with edge_run.Model(kit, **options) as model:
        assert (plan.mode, plan.items, plan.kv_bytes) == (model.plan.mode, model.plan.items, model.plan.kv_bytes)


# A header is parsed once


@contextlib.contextmanager
def parses() -> Iterator[Counter[str]]:
    """Count the headers that this thread parses in this block, by file."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is gguf_header.read_header.__code__:
            found[Path(frame.f_locals["path"]).name] += 1

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_a_run_at_a_terminal_parses_the_header_once(tmp_path: Path) -> None:
    terminal = Terminal()
    terminal.shows_notices = True
    with parses() as found, opened(KIT, ModelConfig(**OPTIONS, cache_folder=tmp_path), terminal):
        pass
    assert found == {KIT.name: 1}


def test_a_run_with_a_draft_model_parses_each_header_once(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    draft = make_model("llama", tmp_path, quantisation="Q4_0")
    config = ModelConfig(**OPTIONS, cache_folder=tmp_path, draft=draft)
    with parses() as found, opened(path, config, Terminal()):
        pass
    assert found == {path.name: 1, draft.name: 1}


@pytest.mark.parametrize("workers", ["", "b"])
def test_a_run_over_a_mesh_parses_the_header_once(workers: str, tmp_path: Path) -> None:
    _run_over_a_mesh(path=make_model("llama", tmp_path), workers=workers)


@in_child
def _run_over_a_mesh(path: Path, workers: str) -> None:
    mesh_engine.MEET_S = 0.1
    terminal = Terminal()
    terminal.shows_notices = True
    with running(path) as run:
        mesh = (run.hub if workers else Hub()).join("d")
        config = ModelConfig(**OPTIONS, cache_folder=path.parent / "cache")
        run.engine.close()
        with parses() as found, opened(path, config, terminal, mesh=MeshOptions(mesh)) as model:
            assert (model.plan.mode == "streamed") == bool(workers)
    assert found == {path.name: 1}


def test_a_trace_and_a_plan_parse_the_header_once(tmp_path: Path) -> None:
    path = make_model("qwen3moe", tmp_path)
    options = {**OPTIONS, "cache_folder": tmp_path / "cache"}
    with parses() as found:
        edge_run.trace(path, "once", tmp_path / "trace.csv", max_tokens=1, **options)
    assert found == {path.name: 1}
    with parses() as found:
        edge_run.plan(path, **options)
    assert found == {path.name: 1}
