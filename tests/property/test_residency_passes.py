"""Whole passes over a Residency, one after the other: no deadlock, and nothing is read in vain."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_run.partition.plan import plan_residency
from edge_run.partition.window import frames_needed
from edge_run.prefetch.schedule import Segment, join_stage_visits, schedule_pass
from frames_drive import Drive


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, list[Segment]]:
    """A pass as models have it: mostly in file order, boundary chunks shared, some met again, layers reused."""
    random_source = random.Random(draw(st.integers(0, 2**32)))
    n_chunks = draw(st.integers(2, 120))
    needs: list[set[int]] = []
    start = 0
    while start < n_chunks:
        stop = min(n_chunks, start + random_source.randint(1, 6))
        first = start - 1 if start and random_source.random() < 0.5 else start
        node = set(range(first, stop))
        if start and random_source.random() < 0.15:
            node.add(random_source.randrange(start))
        needs.append(node)
        start = stop
    if random_source.random() < 0.2:
        needs += needs[: random_source.randint(1, len(needs))]
    return n_chunks, schedule_pass(needs, [random_source.random() < 0.8 for _ in needs])


@pytest.mark.parametrize("eagerness", [[0], [10**6], [0, 3, 1, 10**6]], ids=["slow disk", "fast disk", "uneven disk"])
@given(model=schedules(), share=st.floats(0, 1), is_ragged=st.booleans())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
def test_a_steady_cycle_reads_no_chunk_in_vain(
    eagerness: list[int], model: tuple[int, list[Segment]], share: float, is_ragged: bool
) -> None:
    """Under any plan: no deadlock, no more reads in a pass than the plan says, and no chunk leaves unused."""
    n_chunks, schedule = model
    must_pin = frozenset(range(0, n_chunks, 30)) if is_ragged else frozenset()
    largest = frames_needed([segment.needs for segment in schedule], set(range(n_chunks)) - must_pin)
    available = len(must_pin) + largest + int(share * n_chunks)
    plan = plan_residency([segment.needs for segment in schedule], must_pin, 1, available, 0)
    drive = Drive(n_chunks, schedule, plan.pinned, plan.n_frames)
    drive.run_pass(eagerness)
    drive.run_pass(eagerness)
    n_passes = 6
    reads = [drive.run_pass(eagerness) for _ in range(n_passes)]
    # Reads ahead may fall into one pass or the next: what counts is their sum, give or take the window once.
    assert sum(n for n, _ in reads) <= n_passes * plan.streamed_uses + plan.n_frames
    assert sum(n for _, n in reads) == 0


def test_a_chunk_met_twice_in_the_window_stays() -> None:
    """Its frame was given away, then a chunk read ahead was thrown out to read it again, and so on round the cycle."""
    schedule = schedule_pass([{0}, {1}, {0, 2}, {3}, {4}, {5}], [True] * 6, segment_chunks=1)
    drive = Drive(6, schedule, (), 4)
    passes_run = [drive.run_pass([10**6]) for _ in range(4)]
    assert sum(n_in_vain for _, n_in_vain in passes_run) == 0
    assert sum(n_reads for n_reads, _ in passes_run) <= 4 * 7 + 4


def test_what_streams_of_a_stage_visit_is_all_read_before_it() -> None:
    """Its last segment uses a chunk again: taken for wanted once more, that one kept its frame, and a read was late."""
    visits = join_stage_visits(schedule_pass([{0}, {1}, {2, 3}, {0}, {4}, {5}, {6, 7}, {4}], [True] * 8, 1, [4]), [4])
    assert [visit.acquire for visit in visits] == [(0, 1, 2, 3, 0), (4, 5, 6, 7, 4)]
    drive = Drive(8, visits, (), 4)
    drive.run_pass([0])
    for visit in visits * 2:
        while drive.queue:
            drive._end_a_read()
        assert drive.residency.acquire(visit.acquire) == []
        drive._queue(drive.residency.release(visit.release))
