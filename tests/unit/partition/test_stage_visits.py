"""What streams where stage visits alternate with those of other devices, and which chunks get lent memory."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from edge_run.partition.plan import ResidencyPlan, plan_residency, with_lent
from edge_run.partition.stage_visits import plan_stage_visits
from edge_run.partition.window import frames_needed

Segments = list[tuple[int, ...]]


def visits_of(segments: Segments, n_visits: int) -> list[tuple[int, ...]]:
    """Join the segments of a pass to so many stage visits."""
    ends = [len(segments) * (i + 1) // n_visits for i in range(n_visits)]
    starts = [0, *ends[:-1]]
    return [
        tuple(dict.fromkeys(c for segment in segments[a:b] for c in segment)) for a, b in zip(starts, ends, strict=True)
    ]


def chain(n_chunks: int, per_segment: int = 4) -> Segments:
    return [tuple(range(i, min(i + per_segment, n_chunks))) for i in range(0, n_chunks, per_segment)]


def plan_for(segments: Segments, n_places: int, must_pin: frozenset[int] = frozenset()) -> ResidencyPlan:
    return plan_residency(segments, must_pin, 1, n_places, 0)


@given(
    segments=st.lists(st.lists(st.integers(0, 60), max_size=5, unique=True).map(tuple), min_size=1, max_size=40),
    must_pin=st.frozensets(st.integers(0, 60), max_size=3),
    extra=st.integers(0, 70),
    n_visits=st.integers(1, 6),
    always_lent=st.integers(0, 20),
    more_lent=st.integers(0, 30),
)
def test_a_stage_visit_fits_the_frames_and_all_fits_the_places(
    segments: Segments, must_pin: frozenset[int], extra: int, n_visits: int, always_lent: int, more_lent: int
) -> None:
    used = {chunk for segment in segments for chunk in segment}
    largest = frames_needed(segments, used - must_pin)
    n_places = len(used & must_pin) + largest + extra
    usual = plan_for(segments, n_places, must_pin)
    visits = visits_of(segments, n_visits)
    most_lent = always_lent + more_lent
    plan = plan_stage_visits(usual, segments, visits, must_pin, always_lent, most_lent) if usual.n_frames else None
    if plan is None:
        return
    assert len(plan.pinned) + plan.n_frames <= n_places
    assert len(set(plan.lent)) == len(plan.lent) <= most_lent
    assert plan.n_always_lent <= min(always_lent, len(plan.lent))
    assert plan.n_frames <= usual.n_frames
    streamed = set(plan.streamed)
    assert all(len(streamed.intersection(segment)) <= plan.n_frames for segment in segments), "without lent memory too"
    assert sorted((*plan.pinned, *plan.streamed)) == sorted(used), "every chunk of the pass is planned once, no other"
    assert used & must_pin <= set(plan.pinned)
    assert set(plan.lent) <= set(plan.streamed)
    left = set(plan.streamed) - set(plan.lent[: plan.n_always_lent])
    assert all(len(left.intersection(visit)) <= plan.n_frames for visit in visits), (
        "with any number of those lent on top"
    )
    left -= set(plan.lent)
    assert plan.streamed_uses == (len(left) if len(left) > plan.n_frames else 0), "what fits the frames stays there"


def test_visits_take_fewer_frames_and_read_less_than_running_ahead() -> None:
    segments = chain(400)
    usual = plan_for(segments, 380)
    plan = plan_stage_visits(usual, segments, visits_of(segments, 5), frozenset(), 0)
    assert plan is not None
    assert (plan.n_frames, plan.streamed_uses) == (5, 25)
    assert plan.streamed_uses < usual.streamed_uses


def test_what_streams_of_a_stage_visit_lies_together() -> None:
    segments = chain(400)
    plan = plan_stage_visits(plan_for(segments, 380), segments, visits_of(segments, 5), frozenset(), 0)
    assert plan is not None
    assert plan.streamed == tuple(chunk for start in range(0, 400, 80) for chunk in range(start, start + 5))


def test_there_are_no_visits_where_one_would_not_fit_the_usual_window() -> None:
    segments = chain(400)
    assert plan_stage_visits(plan_for(segments, 200), segments, visits_of(segments, 3), frozenset(), 0) is None
    assert plan_stage_visits(plan_for(segments, 380), segments, visits_of(segments, 1), frozenset(), 0) is None


def test_lent_chunks_stay_and_the_rest_streams_through_the_same_frames() -> None:
    segments = chain(400)
    usual = plan_for(segments, 200)
    plan = with_lent(usual, segments, 50)
    assert len(plan.lent) == 50
    assert (plan.pinned, plan.streamed, plan.n_frames) == (usual.pinned, usual.streamed, usual.n_frames)
    assert plan.streamed_uses == usual.streamed_uses - 50
    gaps = [b - a for a, b in itertools.pairwise(sorted(plan.lent))]
    assert max(gaps) <= 2 * 400 // 50, "spread over the pass"


def test_with_room_for_all_as_lent_chunks_nothing_is_read() -> None:
    segments = chain(100)
    plan = with_lent(plan_for(segments, 80), segments, 1000)
    assert set(plan.lent) == set(plan.streamed)
    assert plan.streamed_uses == 0


def test_what_streams_of_a_stage_visit_has_many_neighbours() -> None:
    """Tensors are used in another order than they lie in: what is read at once is rather one long part than several."""
    visit = (40, 3, 9, 20, 21, 22, 23, 24, 25, 50, 30, 31, 32)
    segments = [visit, *[tuple(range(60 + 12 * i, 72 + 12 * i)) for i in range(7)]]
    n_chunks = len({chunk for segment in segments for chunk in segment})
    plan = plan_stage_visits(plan_for(segments, n_chunks - 21), segments, segments, frozenset(), 0)
    assert plan is not None
    streamed = [chunk for chunk in visit if chunk in plan.streamed]
    assert streamed == [20, 21, 22], "of the longest, the first"


def test_lent_chunks_are_where_they_need_no_frames_of_their_own() -> None:
    segments = chain(400, per_segment=10)
    visits = visits_of(segments, 5)
    without = plan_stage_visits(plan_for(segments, 380), segments, visits, frozenset(), 0)
    plan = plan_stage_visits(plan_for(segments, 280), segments, visits, frozenset(), 100)
    assert without is not None
    assert plan is not None
    assert (plan.n_frames, plan.streamed_uses) == (without.n_frames, without.streamed_uses)
    assert len(plan.lent) == 100


def test_what_is_lent_while_a_text_is_short_is_taken_evenly_from_the_visits() -> None:
    segments = chain(400)
    visits = visits_of(segments, 5)
    plan = plan_stage_visits(plan_for(segments, 280), segments, visits, frozenset(), 80, 90)
    assert plan is not None
    assert (plan.n_frames, plan.n_always_lent, len(plan.lent), plan.streamed_uses) == (10, 80, 90, 40)
    left = set(plan.streamed) - set(plan.lent)
    assert [len(left.intersection(visit)) for visit in visits] == [8] * 5
