"""How what streams is cut: into short segments where few frames remain, and never in vain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from edge_run.base.config import CHUNK_BYTES
from edge_run.base.errors import BudgetError
from edge_run.partition.window import FEW_FRAMES, SEGMENT_CHUNKS, SHORT_SEGMENT_CHUNKS
from edge_run.prefetch.schedule import Segment, schedule_pass
from edge_run.runtime.llama.holdings import Holdings
from edge_run.runtime.planning.memory_plan import plan_streamed, with_page_tables
from edge_run.runtime.planning.terms import Terms
from edge_run.tiers.address_space import AddressSpace, MappedSpan
from edge_run.tiers.gguf import GgufModel

BASE, N_CHUNKS = 1 << 32, 600
SPACE = AddressSpace([MappedSpan(0, BASE, BASE + N_CHUNKS * CHUNK_BYTES, BASE)])


def terms_with_room_for(n_places: int) -> Terms:
    """Terms of a model whose weights have room for so many chunks."""
    gguf = cast(GgufModel, SimpleNamespace(data_bytes=N_CHUNKS * CHUNK_BYTES))
    return Terms(gguf, n_places * with_page_tables(CHUNK_BYTES), Holdings(0, 0, kv_bytes=0), 512, 32, 4)


def cutting(nodes: Sequence[set[int]]) -> Callable[[int], list[Segment]]:
    return lambda segment_chunks: schedule_pass(nodes, [True] * len(nodes), segment_chunks)


SINGLE_CHUNKS = cutting([{chunk} for chunk in range(N_CHUNKS)])


@pytest.mark.parametrize(
    ("n_places", "segment_chunks"), [(8, SHORT_SEGMENT_CHUNKS), (30, SHORT_SEGMENT_CHUNKS), (300, SEGMENT_CHUNKS)]
)
def test_few_frames_are_read_ahead_through_in_short_segments(n_places: int, segment_chunks: int) -> None:
    """Of nine frames, a segment of four chunks and the next one left one to read ahead through."""
    plan, residency = plan_streamed(terms_with_room_for(n_places), SPACE, SINGLE_CHUNKS, ())
    assert residency.segment_chunks == segment_chunks
    assert (residency.n_frames < FEW_FRAMES) == (segment_chunks == SHORT_SEGMENT_CHUNKS)
    assert residency.n_frames >= min(n_places, 3 * segment_chunks)
    assert len(residency.pinned) + residency.n_frames == n_places
    assert plan.window_bytes == residency.n_frames * CHUNK_BYTES


def test_devices_that_compute_in_turn_keep_usual_segments() -> None:
    """What streams is read while others compute."""
    visits = [tuple(range(300)), tuple(range(300, N_CHUNKS))]
    _, residency = plan_streamed(terms_with_room_for(12), SPACE, SINGLE_CHUNKS, (), visits)
    assert residency.segment_chunks == SEGMENT_CHUNKS


def test_the_smallest_budget_is_that_of_short_segments() -> None:
    """Every plan names it, also one with room for usual ones."""
    least = {plan_streamed(terms_with_room_for(n), SPACE, SINGLE_CHUNKS, ())[0].minimum_bytes for n in (2, 8, 300)}
    assert least == {SHORT_SEGMENT_CHUNKS * with_page_tables(CHUNK_BYTES)}
    with pytest.raises(BudgetError):
        plan_streamed(terms_with_room_for(SHORT_SEGMENT_CHUNKS - 1), SPACE, SINGLE_CHUNKS, ())


def test_a_matrix_that_is_not_cut_needs_its_frames_in_short_segments_too() -> None:
    nodes = [*({chunk} for chunk in range(20)), set(range(20, 27))]
    plan, residency = plan_streamed(terms_with_room_for(9), SPACE, cutting(nodes), ())
    assert residency.n_frames >= 7 - len([chunk for chunk in residency.pinned if chunk >= 20])
    assert plan.minimum_bytes == 7 * with_page_tables(CHUNK_BYTES)
