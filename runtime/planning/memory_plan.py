"""The plan that a run keeps to, from its measured context and its graph: every byte of the budget is in one item."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from edge_run.base.errors import BudgetError
from edge_run.base.results import ContextPoint, Plan, PlanItem
from edge_run.base.units import MIB, round_down, round_up
from edge_run.partition.plan import (
    LOOKAHEAD_CHUNKS,
    LOOKAHEAD_SHARE,
    SHARED_LOOKAHEAD_SHARE,
    ResidencyPlan,
    least_chunks,
    named_minimum,
    plan_residency,
    reads_beside,
    too_small,
    with_lent,
)
from edge_run.partition.stage_visits import plan_stage_visits
from edge_run.partition.window import SEGMENT_CHUNKS, SHORT_SEGMENT_CHUNKS, segment_chunks_in
from edge_run.prefetch.schedule import Segment
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.planning.budget_causes import cause_named
from edge_run.runtime.planning.spill_terms import shortened
from edge_run.runtime.planning.terms import Terms
from edge_run.tiers._libc import PAGE
from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.rows import RowRange

PAGE_TABLE_SHARE = 512
LEAST_TABLE_CHUNKS = 4
LEAST_TABLE_BUDGET_BYTES = 4 * MIB


def row_ranges(
    graph: GraphMap, address_space: AddressSpace, micro_batch_tokens: int, *, has_row_slices: bool = False
) -> list[RowRange]:
    """Return the tables that are read by row, and large enough for that to be worth it.

    Those that a pass also reads as a whole are among them where that is done in row slices.
    """
    reads = {read for node in graph for read in node.reads}
    whole = [(read.address, read.address + read.length) for read in reads if not read.row_bytes]
    ranges = []
    for read in reads:
        if not read.row_bytes:
            continue
        end = read.address + read.length
        is_apart = any(start < end and read.address < stop for start, stop in whole)
        if is_apart and not has_row_slices:
            continue
        span = address_space.span_of(read.address)
        start = address_space.border_before(read.address + address_space.chunk_bytes - 1, span)
        stop = address_space.border_before(end, span)
        if is_apart:
            start, stop = round_down(read.address, PAGE), round_up(end, PAGE)
        if stop - start < LEAST_TABLE_CHUNKS * address_space.chunk_bytes:
            continue
        wanted = micro_batch_tokens * (round_up(read.row_bytes, PAGE) + PAGE)
        budget = min(max(wanted, LEAST_TABLE_BUDGET_BYTES), stop - start)
        ranges.append(RowRange(start, stop, span.shard, start - span.base, budget, is_apart))
    return ranges


def plan_plain(terms: Terms) -> Plan:
    """Return the plan of a model that llama.cpp's own loader runs, which promises nothing."""
    return make_plan(terms, mode="llama.cpp")


def plan_resident(terms: Terms, address_space: AddressSpace, chunks: Collection[int]) -> Plan:
    """Return the plan of a model that fits, whose weights lie in `chunks`."""
    weights = address_space.total_bytes(chunks)
    return make_plan(
        terms,
        mode="resident",
        minimum_bytes=with_page_tables(terms.holdings.total_bytes + weights),
        pinned_bytes=weights,
        items=(
            *terms.holdings.items(),
            _page_tables(terms.holdings.total_bytes + weights),
            PlanItem("pinned", weights, "the whole model fits the budget"),
        ),
    )


def plan_streamed(
    terms: Terms,
    address_space: AddressSpace,
    cut: Callable[[int], Sequence[Segment]],
    ranges: Sequence[RowRange],
    visits: Sequence[Sequence[int]] = (),
) -> tuple[Plan, ResidencyPlan]:
    """Return the plan of a model that does not fit, and which chunks stay. Raises BudgetError below the minimum.

    Where a context of the length asked for does not fit, the plan is for one that does. Where few frames remain, the
    segments are short: else computing one and reading the next one take all frames, and neither has a lead.
    cut: returns the segments of a pass, of at most so many chunks where its nodes allow that.
    visits: the chunks of each stage visit, where other devices compute in between.
    """
    try:
        usual = _plan_streamed(terms, address_space, cut, SEGMENT_CHUNKS, ranges, visits)
    except BudgetError:
        usual = None
    if usual and (len(visits) > 1 or not usual[1].n_frames or segment_chunks_in(usual[1].n_frames) == SEGMENT_CHUNKS):
        return usual
    return _plan_streamed(terms, address_space, cut, SHORT_SEGMENT_CHUNKS, ranges, visits)


def streamed_terms(
    terms: Terms, address_space: AddressSpace, cut: Callable[[int], Sequence[Segment]], ranges: Sequence[RowRange]
) -> Terms:
    """Return the terms of the plan of `plan_streamed` on one device, whose context has room. Raises BudgetError.

    Which weights stay takes longer to find. Short segments decide; where a large budget has usual ones all the same,
    the context of the plan is shorter by what two chunks more take.
    """
    return _with_room(terms, address_space, _needs(cut, SHORT_SEGMENT_CHUNKS), SHORT_SEGMENT_CHUNKS, ranges)


def _with_room(
    terms: Terms,
    address_space: AddressSpace,
    segments: Sequence[Sequence[int]],
    segment_chunks: int,
    ranges: Sequence[RowRange],
) -> Terms:
    """Return `terms`, with a shorter context where that asked for has no room. Raises BudgetError."""
    n_least, chunk_bytes = least_chunks(segments, address_space.unmovable, segment_chunks), address_space.chunk_bytes
    least_bytes = n_least * with_page_tables(chunk_bytes)
    while terms.budget_bytes - (other := _bytes_besides(terms, ranges)) < least_bytes:
        error = too_small(terms.budget_bytes, named_minimum(other + least_bytes), other)
        shorter = shortened(terms, error.minimum_bytes - error.found_bytes)
        if not shorter:
            with cause_named(terms):
                raise error
        terms = shorter
    return terms


def _bytes_besides(terms: Terms, ranges: Sequence[RowRange]) -> int:
    """Return what a run holds besides weights."""
    return with_page_tables(terms.holdings.total_bytes + sum(r.budget_bytes for r in ranges))


def _plan_streamed(
    terms: Terms,
    address_space: AddressSpace,
    cut: Callable[[int], Sequence[Segment]],
    segment_chunks: int,
    ranges: Sequence[RowRange],
    visits: Sequence[Sequence[int]],
) -> tuple[Plan, ResidencyPlan]:
    segments = _needs(cut, segment_chunks)
    terms = _with_room(terms, address_space, segments, segment_chunks, ranges)
    other, chunk_bytes = _bytes_besides(terms, ranges), with_page_tables(address_space.chunk_bytes)
    residency = plan_residency(
        segments,
        address_space.unmovable,
        chunk_bytes,
        terms.budget_bytes - other,
        other,
        LOOKAHEAD_CHUNKS if len(visits) > 1 else None,  # while others compute, all of a stage visit is read ahead
        segment_chunks,
        SHARED_LOOKAHEAD_SHARE if terms.sequences > 1 else LOOKAHEAD_SHARE,
    )
    per_batch = residency.streamed_uses
    if residency.n_frames:
        n_most, n_always = terms.most_lent_bytes // chunk_bytes, terms.idle_bytes // chunk_bytes
        by_visits = plan_stage_visits(residency, segments, visits, address_space.unmovable, n_always, n_most)
        residency = by_visits or with_lent(residency, segments, n_most)
    n_lent = min(len(residency.lent), terms.lent_bytes // chunk_bytes)
    per_pass = (
        reads_beside(residency, segments, [n_lent])[0] if n_lent < len(residency.lent) else residency.streamed_uses
    )
    pinned = address_space.total_bytes(residency.pinned)
    steps = terms.context_steps if residency.lent or terms.away_bytes else []
    kept = [min(len(residency.lent), terms.loans_at(tokens, chunk_bytes)) for tokens in steps]
    points = [
        ContextPoint(
            tokens,
            pinned + n_kept * address_space.chunk_bytes,
            n_reads * address_space.chunk_bytes,
            kv_bytes_per_pass=terms.kv_read_at(tokens),
        )
        for tokens, n_kept, n_reads in zip(steps, kept, reads_beside(residency, segments, kept), strict=True)
    ]
    shortest, short_needs = shortened(terms, terms.pool_bytes) or terms, _needs(cut, SHORT_SEGMENT_CHUNKS)
    minimum_chunks = least_chunks(short_needs, address_space.unmovable, SHORT_SEGMENT_CHUNKS)
    rows, least_other = sum(r.budget_bytes for r in ranges), _bytes_besides(shortest, ranges)
    window = residency.n_frames * address_space.chunk_bytes
    plan = make_plan(
        terms,
        mode="streamed",
        minimum_bytes=least_other + minimum_chunks * chunk_bytes,
        pinned_bytes=pinned,
        window_bytes=window,
        streamed_bytes_per_pass=per_pass * address_space.chunk_bytes,
        streamed_bytes_per_batch=per_batch * address_space.chunk_bytes,
        readers=terms.readers,
        lent_bytes=n_lent * address_space.chunk_bytes,
        by_context=tuple(points),
        items=(
            *items_besides_weights(terms, rows, pinned + window),
            PlanItem("pinned", pinned, "weights that never leave: each saves its size of reading per token"),
            PlanItem("window", window, "frames that the other weights flow through, just ahead of their use"),
        ),
    )
    return plan, residency


def _needs(cut: Callable[[int], Sequence[Segment]], segment_chunks: int) -> list[Sequence[int]]:
    return [segment.needs for segment in cut(segment_chunks)]


def items_besides_weights(terms: Terms, rows_bytes: int, weights_bytes: int) -> tuple[PlanItem, ...]:
    """Return the plan's items for everything but weights.

    rows_bytes: the memory of the rows of tables.
    weights_bytes: the memory of the weights.
    """
    mapped = terms.holdings.total_bytes + rows_bytes + weights_bytes
    return (
        *terms.holdings.items(),
        PlanItem("rows", rows_bytes, "rows of token tables in use; the rest of a table stays on disk"),
        _page_tables(mapped),
    )


def _page_tables(mapped_bytes: int) -> PlanItem:
    return PlanItem("page tables", mapped_bytes // PAGE_TABLE_SHARE, "what the kernel keeps to map all this")


def with_page_tables(size_bytes: int) -> int:
    """Return `size_bytes` and the page tables that map them."""
    return size_bytes + size_bytes // PAGE_TABLE_SHARE


def make_plan(terms: Terms, **parts: Any) -> Plan:
    """Return a plan with the fields `parts`; numbers that are left out are 0."""
    nothing = Plan(
        mode="",
        budget_bytes=terms.budget_bytes,
        minimum_bytes=0,
        model_bytes=terms.gguf.data_bytes,
        pinned_bytes=0,
        window_bytes=0,
        streamed_bytes_per_pass=0,
        kv_bytes=terms.holdings.kv_bytes,
        context_tokens=terms.context_tokens,
        wanted_context_tokens=terms.wanted_context_tokens,
        micro_batch_tokens=terms.micro_batch_tokens,
        readers=0,
        gpu=terms.gpu,
        repacked=terms.repacked,
        read_repacked=terms.is_read_repacked,
        spilled_kv_bytes=terms.away_bytes,
        kv_type_reason=terms.kv_type_reason,
    )
    return replace(nothing, **parts)
