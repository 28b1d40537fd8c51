"""Plans made without loading are those that a run makes; what an inspection tells is what llama.cpp then allocates."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from edge_run import BudgetError, ModelConfig
from edge_run.base.results import Plan
from edge_run.base.units import GIB, MIB
from edge_run.partition.plan import PassPlans, ResidencyPlan
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import Driver
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.inspection.cache import inspect
from edge_run.runtime.inspection.inspection import Inspection
from edge_run.runtime.llama.context_shape import context_shape
from edge_run.runtime.llama.library import library_version
from edge_run.runtime.llama.model import LlamaContext, LlamaModel
from edge_run.runtime.planning import expert_plan
from edge_run.runtime.planning.expert_plan import _Sharing, plan_moe
from edge_run.runtime.planning.experts import LEAST_EXPERT_CHUNK_BYTES, MOST_FRAMES, ExpertLayout
from edge_run.runtime.planning.memory_plan import PAGE_TABLE_SHARE
from edge_run.runtime.planning.plan import planner
from edge_run.runtime.planning.planner import Planner, told
from edge_run.tiers._libc import PAGE
from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.gguf import read_gguf
from edge_run.tiers.kv.cells import Cells
from in_child import in_child
from kit_models import streamed
from tiny_models import make_model

OPTIONS: dict[str, Any] = {"context_tokens": 256, "micro_batch_tokens": 16, "threads": 1}


@pytest.mark.parametrize(
    ("name", "kv_type"),
    [(name, "f16") for name in ("llama", "qwen3moe", "gemma3", "deepseek2", "mamba", "jamba", "gpt-oss")]
    + [(name, "q8_0") for name in ("llama", "qwen3moe", "gemma3", "gpt-oss")],
)
def test_sizes_and_graph_are_those_of_the_run(name: str, kv_type: str, tmp_path: Path) -> None:
    path = make_model(name, tmp_path)
    config = ModelConfig(**OPTIONS, kv_type=kv_type, cache_folder=tmp_path / "cache")
    known = inspect(read_gguf(path), config, library_version())
    engine = Engine.open(path, dataclasses.replace(config, backend="llama.cpp"))
    try:
        assert known.kv_bytes == engine.plan.kv_bytes
        assert known.buffer_bytes == engine._loaded.context.buffer_bytes
        assert (known.context_tokens, known.vocabulary) == (engine.plan.context_tokens, engine.model.vocabulary)
    finally:
        engine.close()
    tensors = {tensor.name: tensor for tensor in read_gguf(path).tensors}
    reads = [read for node in known.graph for read in node.reads if read.name in tensors]
    assert {read.name for read in reads} >= {name for name in tensors if name.startswith("blk.0.")} - {"rope_freqs"}
    for read in reads:
        tensor = tensors[read.name]
        assert tensor.offset <= read.address < tensor.offset + tensor.size_bytes


def test_what_is_resident_has_page_tables_too(grown: Path, tmp_path: Path) -> None:
    plans = planner(grown, ModelConfig(**OPTIONS, cache_folder=tmp_path))
    sizes = {item.what: item.size_bytes for item in plans.plan(GIB).items}
    mapped = sum(sizes.values()) - sizes["page tables"]
    assert sizes["page tables"] == mapped // PAGE_TABLE_SHARE > 0
    least = plans._whole_bytes
    assert least >= sum(sizes.values()), "a chunk may be smaller than the others"
    assert (plans.plan(least).mode, plans.plan(least - 1).mode) == ("resident", "streamed")


@in_child
def test_the_plan_is_that_of_the_run(grown: Path, tmp_path: Path) -> None:
    options = {**streamed(), "cache_folder": tmp_path}
    plan = planner(grown, ModelConfig(**options)).plan()
    engine = Engine.open(grown, ModelConfig(**options))
    try:
        found = engine.plan
    finally:
        engine.close()
    assert (plan.mode, plan.kv_bytes, plan.model_bytes) == (found.mode, found.kv_bytes, found.model_bytes)
    sizes, found_sizes = ({item.what: item.size_bytes for item in p.items} for p in (plan, found))
    for what in ("kv", "buffers", "work", "reserve", "rows"):
        assert sizes[what] == found_sizes[what]
    difference = plan.pinned_bytes + sizes["program"] - found.pinned_bytes - found_sizes["program"]
    assert abs(difference) <= 16 * MIB, "what Python holds, weights have not"


def test_plans_of_every_budget_from_the_smallest_to_the_whole_model(grown: Path, tmp_path: Path) -> None:
    planned = planner(grown, ModelConfig(**OPTIONS, cache_folder=tmp_path))
    plans = planned.sweep()
    assert [plan.mode for plan in plans] == ["streamed"] * (len(plans) - 1) + ["resident"]
    assert plans[-1].budget_bytes > 120 * MIB
    reads = [plan.streamed_bytes_per_pass for plan in plans]
    assert reads == sorted(reads, reverse=True)
    assert reads[-1] == 0
    for plan in plans:
        assert sum(item.size_bytes for item in plan.items) <= plan.budget_bytes
    with pytest.raises(BudgetError) as caught:
        planned.plan(plans[0].budget_bytes // 2)
    assert caught.value.minimum_bytes <= plans[0].budget_bytes


def test_planning_loads_neither_llama_cpp_nor_numpy_once_the_model_is_known(grown: Path, tmp_path: Path) -> None:
    config = ModelConfig(**OPTIONS, cache_folder=tmp_path)
    inspect(read_gguf(grown), config, library_version())
    model, cache = json.dumps(str(grown)), json.dumps(str(tmp_path))
    code = (
        "import sys; from pathlib import Path; from edge_run.base.config import ModelConfig\n"
        "from edge_run.runtime.planning.plan import planner\n"
        f"planner(Path({model}), ModelConfig(**{OPTIONS!r}, cache_folder=Path({cache}))).plan()\n"
        "print(sorted({'numpy', 'llama_cpp'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_is_known_of_a_model_survives_its_way_through_json(grown: Path, tmp_path: Path) -> None:
    known = inspect(read_gguf(grown), ModelConfig(**OPTIONS, cache_folder=tmp_path), library_version())
    assert Inspection.from_json(known.to_json()) == known


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gpt-oss"])
def test_what_layers_with_a_window_keep_is_what_their_context_has(name: str, tmp_path: Path) -> None:
    path = make_model(name, tmp_path)
    config = ModelConfig(context_tokens=4096, micro_batch_tokens=16, threads=1, cache_folder=tmp_path / "cache")
    known = inspect(read_gguf(path), config, library_version())
    shape, driver = context_shape(config, 0, 1), Driver()
    with (
        LlamaModel([path]) as model,
        closing(LlamaContext(model, shape, driver.callback)) as context,
        closing(LocalDecoder(model, context, driver, shape)) as decoder,
    ):
        decoder.map_graph()
        found = Cells(driver.take_flow().cells, PAGE)
    assert [tensor.n_cells for tensor in known.cells.tensors] == [tensor.n_cells for tensor in found.tensors]
    assert len({tensor.n_cells for tensor in found.tensors}) == 2
    for n_cells in (64, 512, 4096):
        assert abs(known.cells.bytes_for(n_cells) - found.bytes_for(n_cells)) <= PAGE * len(found.tensors)


def check_that_a_mixture_is_cut_once(plans: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all plans that an opening weighs: of a large one that takes a second, as does planning what streams."""
    cut, planned, of, plan = list[int](), list[int](), ExpertLayout.of, PassPlans.plan

    def noted(graph: GraphMap, space: AddressSpace, *others: Any, **options: Any) -> ExpertLayout:
        cut.append(space.chunk_bytes)
        return of(graph, space, *others, **options)

    def counted(passes: PassPlans, *given: Any) -> ResidencyPlan:
        planned.append(len(cut))
        return plan(passes, *given)

    monkeypatch.setattr(ExpertLayout, "of", noted)
    monkeypatch.setattr(PassPlans, "plan", counted)
    monkeypatch.setattr(_Sharing, "_pins_dense", False)  # what is dense streams too
    shorter = dataclasses.replace(plans.known, context_tokens=128)
    others = [Planner(dataclasses.replace(plans.prepared, known=known)) for known in (plans.known, shorter)]
    sketched = [other.sketch(256 * MIB) for other in others]
    assert (len(cut), planned) == (1, [])
    for other, sketch in zip(others, sketched, strict=True):
        plan_of_all = other.plan(256 * MIB)
        assert plan_of_all.mode == sketch.mode == "streamed"
        assert plan_of_all.context_tokens == sketch.context_tokens
    assert (len(cut), planned) == (1, [1, 1])


def test_the_smallest_budgets_that_are_named_of_a_mixture_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = planner(make_model("qwen3moe", tmp_path), ModelConfig(**OPTIONS, cache_folder=tmp_path / "cache"))
    terms = plans._streamed_terms

    def planned(budget_bytes: int, more_bytes: int = 0) -> Plan:
        """Plan beside `more_bytes` of the program's own."""
        holdings = dataclasses.replace(terms.holdings, program_bytes=terms.holdings.program_bytes + more_bytes)
        moe = plan_moe(
            dataclasses.replace(terms, budget_bytes=budget_bytes, holdings=holdings), plans._graph, plans._address_space
        )
        assert moe is not None
        return moe.plan

    for budget_bytes in (256 * MIB, 8 * GIB, 32 * GIB):
        planned(planned(budget_bytes).minimum_bytes)
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "_whole_bytes", 1 << 60)  # so that it streams
        check_that_a_mixture_is_cut_once(plans, patch)
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "_whole_bytes", 1 << 60)
        told_bytes = told(plans, 32 * GIB).minimum_bytes
        assert told_bytes < plans.plan(32 * GIB).minimum_bytes, "of larger chunks"
        plans.plan(told_bytes)
    monkeypatch.setattr(expert_plan, "named_minimum", int)  # without a margin, which covers up that chunks are larger
    small_chunks_end = MOST_FRAMES * LEAST_EXPERT_CHUNK_BYTES
    for lacking_bytes in (-MIB, 0, MIB, 8 * MIB, 16 * MIB):
        more_bytes = small_chunks_end - planned(256 * MIB).minimum_bytes - lacking_bytes
        with pytest.raises(BudgetError) as caught:
            planned(1, more_bytes)
        planned(caught.value.minimum_bytes, more_bytes)
