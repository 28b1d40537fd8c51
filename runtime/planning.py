"""From what was measured and mapped to the plan that a run keeps: every byte of the budget has a line in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil

from edge_run.base.results import Plan, PlanItem
from edge_run.base.units import MIB, round_down, round_up
from edge_run.devices.memory import ProcessMemory, process_memory
from edge_run.partition.plan import ResidencyPlan, plan_residency
from edge_run.runtime.graph import GraphMap
from edge_run.tiers._libc import PAGE
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.territory import Territory

if TYPE_CHECKING:
    from edge_run.runtime.llama_model import LlamaContext

RESERVE_BYTES = 32 * MIB
PAGE_TABLE_SHARE = 512
LEAST_TABLE_CHUNKS = 4
LEAST_TABLE_BUDGET_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the process holds besides weights.

    program_bytes: resident, Python and llama.cpp with its graphs. kv_bytes and buffer_bytes: allocated by llama.cpp's
    context, and counted in full, touched yet or not. work_bytes: what matrix multiplications will allocate for their
    inputs.
    """

    program_bytes: int
    kv_bytes: int = 0
    buffer_bytes: int = 0
    work_bytes: int = 0

    @classmethod
    def now(cls) -> Holdings:
        """Return what is held before there is a context."""
        return cls(process_memory().resident_bytes)

    @classmethod
    def since(cls, before: ProcessMemory, context: LlamaContext, work_bytes: int) -> Holdings:
        """Return what is held after `context` was made; besides its buffers it takes what memory grew by."""
        after = process_memory()
        if not context.buffer_bytes:
            buffers = max(after.data_bytes - before.data_bytes, after.resident_bytes - before.resident_bytes)
            return cls(before.resident_bytes, context.kv_bytes, max(0, buffers - context.kv_bytes), work_bytes)
        graphs = max(0, after.resident_bytes - before.resident_bytes - context.kv_bytes)
        return cls(before.resident_bytes + graphs, context.kv_bytes, context.buffer_bytes, work_bytes)

    @property
    def total_bytes(self) -> int:
        """All of it, with a reserve for what Python and the tokenizer still allocate."""
        return sum(item.size_bytes for item in self.items())

    def items(self) -> tuple[PlanItem, ...]:
        """Return the plan's lines for all but weights."""
        return (
            PlanItem("program", self.program_bytes, "Python, llama.cpp and the vocabulary"),
            PlanItem("kv", self.kv_bytes, "the context's keys and values"),
            PlanItem("buffers", self.buffer_bytes, "llama.cpp's compute and output buffers, as it reports them"),
            PlanItem("work", self.work_bytes, "inputs of matrix multiplications, converted for the kernels"),
            PlanItem("reserve", RESERVE_BYTES, "for what is allocated later: text, samplers, thread stacks"),
        )


def work_bytes(gguf: GgufModel, micro_batch_tokens: int) -> int:
    """Return what ggml allocates to convert the widest input of a matrix multiplication, at 2 bytes a number."""
    n_used = gguf.value("expert_used_count")
    experts = n_used if isinstance(n_used, int) else 1
    widths = (t.shape[0] * (experts if len(t.shape) > 2 else 1) for t in gguf.tensors if len(t.shape) > 1)
    return 2 * micro_batch_tokens * max(widths, default=0)


def compute_threads(wanted: int | None) -> int:
    """Return the threads to compute with: as asked, or one per physical core that this process may use."""
    if wanted:
        return wanted
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))


@dataclass(frozen=True, slots=True)
class RowRange:
    """The inside of a table that is looked up by row: addresses [start, stop), by chunks, and what to keep of it."""

    start: int
    stop: int
    shard: int
    file_offset: int
    budget_bytes: int


def row_ranges(graph: GraphMap, territory: Territory, micro_batch_tokens: int) -> list[RowRange]:
    """Return the tables that are only ever read by row and are large enough to be worth it."""
    reads = {read for node in graph for read in node.reads}
    whole = [(read.address, read.address + read.length) for read in reads if not read.row_bytes]
    ranges = []
    for read in reads:
        if not read.row_bytes:
            continue
        if any(start < read.address + read.length and read.address < stop for start, stop in whole):
            continue
        start = round_up(read.address, territory.chunk_bytes)
        stop = round_down(read.address + read.length, territory.chunk_bytes)
        if stop - start < LEAST_TABLE_CHUNKS * territory.chunk_bytes:
            continue
        span = territory.span_of(read.address)
        wanted = micro_batch_tokens * (round_up(read.row_bytes, PAGE) + PAGE)
        budget = min(max(wanted, LEAST_TABLE_BUDGET_BYTES), stop - start)
        ranges.append(RowRange(start, stop, span.shard, start - span.base, budget))
    return ranges


def plan_plain(gguf: GgufModel, budget_bytes: int, kv_bytes: int, context_tokens: int) -> Plan:
    """Return the plan of a model that llama.cpp's own loader runs: nothing is promised."""
    return _plan(gguf, budget_bytes, kv_bytes, context_tokens, mode="llama.cpp")


def plan_resident(
    gguf: GgufModel, budget_bytes: int, holdings: Holdings, context_tokens: int, territory: Territory
) -> Plan:
    """Return the plan of a model that fits."""
    weights = territory.total_bytes(range(territory.n_chunks))
    items = (*holdings.items(), PlanItem("pinned", weights, "the whole model fits the budget"))
    minimum = holdings.total_bytes + weights
    return _plan(
        gguf,
        budget_bytes,
        holdings.kv_bytes,
        context_tokens,
        mode="resident",
        minimum_bytes=minimum,
        pinned_bytes=weights,
        items=items,
    )


def plan_streamed(
    gguf: GgufModel,
    budget_bytes: int,
    holdings: Holdings,
    context_tokens: int,
    territory: Territory,
    stretches: Sequence[Sequence[int]],
    ranges: Sequence[RowRange],
    readers: int,
) -> tuple[Plan, ResidencyPlan]:
    """Return the plan of a model that does not fit, and which chunks stay. Raises BudgetError below the minimum."""
    rows = sum(r.budget_bytes for r in ranges)
    other = _with_page_tables(holdings.total_bytes + rows)
    chunk_bytes = _with_page_tables(territory.chunk_bytes)
    residency = plan_residency(stretches, territory.ragged, chunk_bytes, budget_bytes - other, other)
    pinned = territory.total_bytes(residency.pinned)
    window = residency.n_frames * territory.chunk_bytes
    page_tables = (holdings.total_bytes + rows + pinned + window) // PAGE_TABLE_SHARE
    items = (
        *holdings.items(),
        PlanItem("rows", rows, "rows of token tables in use; the rest of a table stays on disk"),
        PlanItem("page tables", page_tables, "what the kernel keeps to map all this"),
        PlanItem("pinned", pinned, "weights that never leave: each saves its size of reading per token"),
        PlanItem("window", window, "frames that the other weights flow through, just ahead of their use"),
    )
    minimum = other + residency.minimum_chunks * chunk_bytes
    plan = _plan(
        gguf,
        budget_bytes,
        holdings.kv_bytes,
        context_tokens,
        mode="streamed",
        minimum_bytes=minimum,
        pinned_bytes=pinned,
        window_bytes=window,
        streamed_bytes_per_pass=residency.streamed_uses * territory.chunk_bytes,
        readers=readers,
        items=items,
    )
    return plan, residency


def _with_page_tables(size_bytes: int) -> int:
    return size_bytes + size_bytes // PAGE_TABLE_SHARE


def _plan(gguf: GgufModel, budget_bytes: int, kv_bytes: int, context_tokens: int, **parts: Any) -> Plan:
    nothing = Plan(
        mode="",
        budget_bytes=budget_bytes,
        minimum_bytes=0,
        model_bytes=gguf.data_bytes,
        pinned_bytes=0,
        window_bytes=0,
        streamed_bytes_per_pass=0,
        kv_bytes=kv_bytes,
        context_tokens=context_tokens,
        readers=0,
    )
    return replace(nothing, **parts)
