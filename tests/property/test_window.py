"""Which chunks stream: as few as the frames allow, held against every choice there is on small cases."""

from __future__ import annotations

from collections import Counter
from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from edge_run.base.errors import BudgetError
from edge_run.partition.plan import ResidencyPlan, plan_residency
from edge_run.partition.window import SEGMENT_CHUNKS, Group, frames_needed, groups_of, most_pinned

Segments = list[tuple[int, ...]]
NOTHING = frozenset[int]()


@st.composite
def once(draw: st.DrawFn, most_chunks: int, most_in_all: int = 100) -> Segments:
    """Segments of which no two share a chunk: small ones, and perhaps one that is large."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    sizes.insert(draw(st.integers(0, len(sizes))), draw(st.integers(1, most_chunks)))
    while sum(sizes) > most_in_all:
        sizes.pop()
    chunks = iter(range(sum(sizes)))
    return [tuple(next(chunks) for _ in range(size)) for size in sizes]


@st.composite
def shared(draw: st.DrawFn) -> Segments:
    """Segments that may share chunks, as neighbours at a border do, and layers that are used twice."""
    segments = draw(once(20))
    return [
        tuple(sorted({*segment, *draw(st.lists(st.sampled_from(list(chain(*segments))), max_size=2))}))
        for segment in segments
    ]


def plan_for(segments: Segments, n_places: int, ahead: int = 0) -> ResidencyPlan | None:
    try:
        return plan_residency(segments, NOTHING, 1, n_places, 0, ahead)
    except BudgetError:
        return None


def fits(groups: list[Group], pinned: frozenset[int]) -> bool:
    """Return whether every group has its frames when `pinned` are pinned."""
    return all(len(pinned.difference(group.chunks)) <= group.most_outside for group in groups)


@given(segments=once(6, 9), spare=st.integers(0, 8), ahead=st.integers(0, 3))
def test_no_choice_pins_more(segments: Segments, spare: int, ahead: int) -> None:
    chunks = list(chain(*segments))
    n_places = max(map(len, segments)) + spare
    groups = groups_of(segments, Counter(chunks), n_places, ahead, 0)
    limit = min(n_places, len(chunks)) - 1
    counts = range(limit + 1)
    best = max((n for n in counts if any(fits(groups, frozenset(c)) for c in combinations(chunks, n))), default=0)
    sizes = list(map(len, segments))
    smallest = min(a + b for a, b in zip(sizes, [*sizes[1:], sizes[0]], strict=True))  # where the cycle begins
    assert best - smallest <= most_pinned(groups, limit) <= best


@given(segments=shared(), spare=st.integers(0, 30), ahead=st.integers(0, 16))
def test_frames_are_enough_for_every_segment_wherever_a_pass_is_cut(segments: Segments, spare: int, ahead: int) -> None:
    n_places = max(map(len, segments)) + spare
    plan = plan_for(segments, n_places, ahead)
    assert plan
    assert len(plan.pinned) + plan.n_frames <= n_places or not plan.streamed
    assert set(plan.pinned) | set(plan.streamed) == set(chain(*segments))
    assert not set(plan.pinned) & set(plan.streamed)
    assert frames_needed(segments, plan.streamed) <= plan.n_frames
    small = list(chain(*(segment for segment in segments if len(segment) <= SEGMENT_CHUNKS)))
    reach = min(SEGMENT_CHUNKS, max(map(len, segments)))
    for start in range(len(small)):  # other graphs are cut elsewhere, but never within a large matrix
        assert len({*small[start : start + reach]} & {*plan.streamed}) <= plan.n_frames


@given(segments=once(30), ahead=st.integers(0, 16))
def test_more_memory_never_streams_more(segments: Segments, ahead: int) -> None:
    least, n_chunks = max(map(len, segments)), sum(map(len, segments))
    plans = [plan_for(segments, n_places, ahead) for n_places in range(least, n_chunks + 2)]
    reads = [plan.streamed_uses for plan in plans if plan]
    assert len(reads) == len(plans)
    assert reads == sorted(reads, reverse=True)
    assert reads[-1] == 0


@given(segments=once(30), share=st.floats(0.0, 1.0))
def test_most_of_a_large_matrix_is_pinned_before_it_makes_the_window_large(segments: Segments, share: float) -> None:
    """With room for it and two other segments, the window is no larger than those two need."""
    sizes = sorted(map(len, segments))
    n_chunks, largest, usual = sum(sizes), sizes[-1], sizes[-2] if len(sizes) > 1 else sizes[-1]
    n_places = largest + 2 * usual + SEGMENT_CHUNKS + round(share * n_chunks)
    plan = plan_for(segments, n_places)
    assert plan
    if plan.streamed:
        assert plan.n_frames <= 2 * usual + SEGMENT_CHUNKS + 4
