"""The smallest window: no choice of pinned chunks reads less, more memory never means more reading, and frames suffice.

Passes are small enough here to try all choices, or are cut in all the ways in which graphs of one model are cut.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from hypothesis import assume, given
from hypothesis import strategies as st

from edge_run.partition.plan import (
    LOOKAHEAD_CHUNKS,
    PassPlans,
    ResidencyPlan,
    plan_residency,
    reads_beside,
    spread_evenly,
    with_lent,
    with_spare,
)
from edge_run.partition.window import SEGMENT_CHUNKS, frames_needed
from edge_run.prefetch.schedule import Segment, schedule_pass
from frames_drive import Drive

Segments = list[tuple[int, ...]]
MOST_CHUNKS = 9
IN_FLIGHT = 2  # frames that a plan spares besides the look-ahead asked for: a read in flight and the next


def plan_for(segments: Segments, n_places: int, n_ahead: int | None = None) -> ResidencyPlan:
    """n_ahead: the frames that are spared; None: as many as a plan of a run spares."""
    ahead = None if n_ahead is None else n_ahead - IN_FLIGHT
    return plan_residency(segments, frozenset(), 1, n_places, 0, lookahead_chunks=ahead)


@st.composite
def passes(draw: st.DrawFn, most_chunks: int = MOST_CHUNKS, *, uses_again: bool = False) -> Segments:
    """The segments of a pass in file order: matrices of very different sizes, some of which share a chunk at the ends.

    uses_again: whether some segments need a chunk of an earlier one as well, or come twice.
    """
    source = random.Random(draw(st.integers(0, 2**32)))
    n_chunks = draw(st.integers(2, most_chunks))
    segments: Segments = []
    start = 0
    while start < n_chunks:
        size = source.choice((1, 1, 2, 2, 3, 4, 6, n_chunks // 3 + 1))
        stop = min(n_chunks, start + size)
        needs = set(range(start - (start > 0 and source.random() < 0.3), stop))
        if uses_again and source.random() < 0.2:
            needs.add(source.randrange(stop))
        segments.append(tuple(sorted(needs)))
        start = stop
    if uses_again and source.random() < 0.3:
        segments += segments[: source.randint(1, len(segments))]
    return segments


def choices(segments: Segments, n_places: int, n_ahead: int | None) -> Iterator[frozenset[int]]:
    """All chunks that may be pinned, so that frames are enough; with look-ahead too, unless `n_ahead` is None."""
    chunks = sorted(set(chain.from_iterable(segments)))
    pairs = [{*segments[i - 1], *segments[i]} for i in range(len(segments))]
    for n_pinned in range(max(1, min(n_places, len(chunks)))):
        n_frames = n_places - n_pinned
        for pinned in map(frozenset, itertools.combinations(chunks, n_pinned)):
            streamed = set(chunks) - pinned
            if frames_needed(segments, streamed) > n_frames:
                continue
            if n_ahead is None or all(
                len(pair - pinned) + min(n_ahead, n_places - len(pair)) <= n_frames for pair in pairs
            ):
                yield pinned


def fewest_streamed(segments: Segments, n_places: int, n_ahead: int | None) -> int:
    n_chunks = len(set(chain.from_iterable(segments)))
    if n_places >= n_chunks:
        return 0
    return n_chunks - max(map(len, choices(segments, n_places, n_ahead)))


@given(segments=passes(), extra=st.integers(0, MOST_CHUNKS), n_ahead=st.integers(0, 3))
def test_no_choice_with_the_same_look_ahead_streams_less(segments: Segments, extra: int, n_ahead: int) -> None:
    """One chunk may be lost where the cycle begins, or to a chunk that two matrices share."""
    n_places = max(SEGMENT_CHUNKS, *map(len, segments)) + extra
    plan = plan_for(segments, n_places, n_ahead)
    best = fewest_streamed(segments, n_places, n_ahead)
    assert best <= len(plan.streamed) <= best + 1
    assert plan.streamed_uses == len(plan.streamed)


@given(segments=passes(), extra=st.integers(0, MOST_CHUNKS), n_ahead=st.integers(0, 3))
def test_look_ahead_costs_no_more_than_its_frames(segments: Segments, extra: int, n_ahead: int) -> None:
    """Without any, a budget that is smaller by these and the next segment's frames streams as much at best."""
    largest = max(SEGMENT_CHUNKS, *map(len, segments))
    n_places = largest + extra
    smaller = n_places - n_ahead - max(map(len, segments))
    assume(smaller >= largest)
    assert len(plan_for(segments, n_places, n_ahead).streamed) <= 1 + fewest_streamed(segments, smaller, None)


@given(segments=passes(400), n_ahead=st.sampled_from((None, None, 2, 6, 18)))
def test_a_larger_budget_never_means_more_reading(segments: Segments, n_ahead: int | None) -> None:
    n_chunks = len(set(chain.from_iterable(segments)))
    largest = frames_needed(segments, range(n_chunks))
    rooms = range(largest, n_chunks + 1, max(1, n_chunks // 12))
    reads = [plan_for(segments, n_places, n_ahead).streamed_uses for n_places in rooms]
    assert reads == sorted(reads, reverse=True)
    if n_ahead is None:
        plans = PassPlans(segments, frozenset())
        assert [plans.least_reads(n_places, 0) for n_places in rooms] == reads, "it is known beforehand"
        lending = (with_lent(plan_for(segments, n_places), segments, 7).streamed_uses for n_places in rooms)
        assert [plans.least_reads(n_places, 7) for n_places in rooms] == list(lending)


@given(segments=passes(400, uses_again=True), share=st.floats(0, 1), n_ahead=st.sampled_from((None, 2, 6, 18)))
def test_frames_and_pinned_chunks_never_exceed_the_places(
    segments: Segments, share: float, n_ahead: int | None
) -> None:
    chunks = set(chain.from_iterable(segments))
    n_places = frames_needed(segments, chunks) + int(share * len(chunks))
    plan = plan_for(segments, n_places, n_ahead)
    assert len(plan.pinned) + plan.n_frames <= n_places
    assert sorted((*plan.pinned, *plan.streamed)) == sorted(chunks)
    assert not plan.n_frames or min(n_places, frames_needed(segments, plan.streamed)) <= plan.n_frames


class Model:
    """The nodes of a model's graphs: matrices, and what follows each of them, as chunks in file order.

    needs: the chunks of each node.
    may_cut: whether the node multiplies by a matrix.
    """

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.needs: list[set[int]] = []
        self.may_cut: list[bool] = []
        self.n_chunks = 1
        for _ in range(source.randint(2, 30)):
            size = source.choice((0, 1, 1, 2, 3, 5, 9, source.randint(10, 60)))
            first = max(0, self.n_chunks - source.randint(0, 1))
            self._add(set(range(first, self.n_chunks + size)) or {first - 1}, may_cut=True)
            for _ in range(source.randint(0, 3)):
                follower = source.choice((set(), {self.n_chunks}, {source.randrange(self.n_chunks)}))
                self._add(follower, may_cut=False)

    def _add(self, needs: set[int], *, may_cut: bool) -> None:
        self.needs.append(needs)
        self.may_cut.append(may_cut)
        self.n_chunks = max(self.n_chunks, *(chunk + 1 for chunk in needs), 1)

    def pass_of_one(self) -> list[Segment]:
        return schedule_pass(self.needs, self.may_cut)

    def another_pass(self, source: random.Random) -> list[Segment]:
        """A pass with another graph: without its beginning or end, with borders, in smaller pieces, or node by node."""
        matrices = [i for i, is_matrix in enumerate(self.may_cut) if is_matrix]
        first = source.choice((0, 0, source.choice(matrices)))
        end = source.choice((len(self.needs), len(self.needs), source.randint(first + 1, len(self.needs))))
        needs, may_cut = self.needs[first:end], self.may_cut[first:end]
        if source.random() < 0.2:
            return schedule_pass(needs, [True] * len(needs), segment_chunks=1)
        borders = [i for i in range(1, len(needs)) if source.random() < 0.1] if source.random() < 0.3 else []
        return schedule_pass(needs, may_cut, source.randint(1, SEGMENT_CHUNKS), borders)


@given(seed=st.integers(0, 2**32), share=st.floats(0, 1), n_ahead=st.sampled_from((None, 2, 6, 18)))
def test_passes_that_are_cut_elsewhere_never_get_stuck(seed: int, share: float, n_ahead: int | None) -> None:
    """Every pass gets its chunks, in frames planned for passes of one token, whatever its graph, on any drive."""
    model, source = Model(seed), random.Random(seed)
    schedule = model.pass_of_one()
    segments = [segment.needs for segment in schedule]
    n_places = max(SEGMENT_CHUNKS, *map(len, segments)) + int(share * model.n_chunks)
    plan = plan_for(segments, n_places, n_ahead)
    assume(plan.n_frames)
    drive = Drive(model.n_chunks, schedule, plan.pinned, plan.n_frames)
    for _ in range(6):
        drive.schedule = source.choice((schedule, model.another_pass(source)))
        assert all(len(set(plan.streamed).intersection(one.needs)) <= plan.n_frames for one in drive.schedule)
        drive.run_pass([source.choice((0, 1, 10**6)) for _ in range(5)])


def test_a_large_matrix_takes_few_frames() -> None:
    """It would take as many as it has chunks, but most of it is pinned."""
    layers = [tuple(range(i, i + 4)) for i in range(0, 300, 4)]
    matrix = tuple(range(300, 450))
    ahead = LOOKAHEAD_CHUNKS + IN_FLIGHT
    in_use = 2 * SEGMENT_CHUNKS + ahead
    plans = [plan_for([*layers, matrix], n_places, ahead) for n_places in (150, 180, 300)]
    assert [plan.n_frames for plan in plans] == [in_use, in_use, 23]
    assert plan_for([*layers, matrix], 150).n_frames == 2 * SEGMENT_CHUNKS + IN_FLIGHT, "nothing to spare for more"


def test_a_table_that_is_also_the_output_is_pinned_first() -> None:
    """A pass begins and ends with it, so it is in the way of two segments, and would be read twice."""
    table = tuple(range(70))
    layers = [tuple(range(i, i + 4)) for i in range(70, 270, 4)]
    plan = plan_for([table, *layers, table], 100)
    assert len(set(table) - set(plan.pinned)) <= SEGMENT_CHUNKS
    assert plan.streamed_uses <= 270 - 100 + 2 * SEGMENT_CHUNKS + LOOKAHEAD_CHUNKS + IN_FLIGHT


@given(segments=passes(most_chunks=40, uses_again=True), n_places=st.integers(4, 40), n_ahead=st.integers(0, 8))
def test_whatever_is_unpinned_of_what_is_spare_the_frames_suffice(
    segments: Segments, n_places: int, n_ahead: int
) -> None:
    chunks = set(chain.from_iterable(segments))
    fixed = frozenset(chunk for chunk in chunks if chunk % 7 == 0)
    n_least = len(fixed) + max(SEGMENT_CHUNKS, *map(len, segments))
    plan = plan_residency(segments, fixed, 1, max(n_places, n_least), 0, lookahead_chunks=n_ahead)
    plan = with_spare(plan, segments, fixed)
    assert set(plan.spare) <= set(plan.pinned) - fixed
    assert len(set(plan.spare)) == len(plan.spare)
    for n_unpinned in range(len(plan.spare) + 1):
        streamed = {*plan.streamed, *plan.spare[:n_unpinned]}
        assert frames_needed(segments, streamed) <= plan.n_frames or not n_unpinned
    staying = set(plan.pinned) - set(plan.spare) - fixed
    for chunk in staying if plan.n_frames >= SEGMENT_CHUNKS else ():
        assert any(len(streamed.intersection(one)) == plan.n_frames for one in segments if chunk in one), "none is left"


@given(segments=passes(most_chunks=30, uses_again=True), n_places=st.integers(4, 30), most_lent=st.integers(1, 30))
def test_more_lent_memory_never_means_more_reading(segments: Segments, n_places: int, most_lent: int) -> None:
    """The more stays, the less is read: of what there is room for, and of what there is room for at most."""
    plan = plan_for(segments, max(n_places, SEGMENT_CHUNKS, *map(len, segments)))
    lending = with_lent(plan, segments, most_lent)
    assert len(set(lending.lent)) == len(lending.lent) == min(most_lent, len(plan.streamed))
    assert set(lending.lent) <= set(plan.streamed)
    assert with_lent(plan, segments, most_lent + 1).streamed_uses <= lending.streamed_uses
    reads = reads_beside(lending, segments, range(len(lending.lent) + 1))
    assert reads[0] == plan.streamed_uses
    assert reads[-1] == lending.streamed_uses
    assert all(more <= less for less, more in itertools.pairwise(reads))


def test_what_is_read_several_times_in_a_pass_gets_lent_memory_first() -> None:
    """As in Qwen2.5 0.5B, where small tensors of all layers share chunks."""
    shared, segments = 1000, [(i, 1000) if i % 10 == 0 else (i,) for i in range(200)]
    plan = ResidencyPlan((), tuple(dict.fromkeys(chain.from_iterable(segments))), 6, 0, 2)
    lending, evenly = with_lent(plan, segments, 6), replace(plan, lent=tuple(spread_evenly(plan.streamed, 6)))
    assert reads_beside(evenly, segments, [6]) >= [214]
    assert lending.lent[0] == shared
    assert reads_beside(plan, segments, [0]) == [220]
    assert lending.streamed_uses == 200 - 5
