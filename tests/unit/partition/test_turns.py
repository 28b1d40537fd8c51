"""What streams when a pass is computed in turns, and which chunks are guests of lent memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_run.partition.plan import ResidencyPlan, plan_residency, with_guests
from edge_run.partition.turns import plan_turns

Stretches = list[tuple[int, ...]]


def turns_of(stretches: Stretches, n_turns: int) -> list[tuple[int, ...]]:
    """Join the stretches of a pass to so many turns."""
    ends = [len(stretches) * (i + 1) // n_turns for i in range(n_turns)]
    starts = [0, *ends[:-1]]
    return [
        tuple(dict.fromkeys(c for stretch in stretches[a:b] for c in stretch))
        for a, b in zip(starts, ends, strict=True)
    ]


def chain(n_chunks: int, per_stretch: int = 4) -> Stretches:
    return [tuple(range(i, min(i + per_stretch, n_chunks))) for i in range(0, n_chunks, per_stretch)]


def plan_for(stretches: Stretches, n_places: int, must_pin: frozenset[int] = frozenset()) -> ResidencyPlan:
    return plan_residency(stretches, must_pin, 1, n_places, 0)


@given(
    stretches=st.lists(st.lists(st.integers(0, 60), max_size=5, unique=True).map(tuple), min_size=1, max_size=40),
    must_pin=st.frozensets(st.integers(0, 60), max_size=3),
    extra=st.integers(0, 70),
    n_turns=st.integers(1, 6),
    most_guests=st.integers(0, 20),
)
def test_a_turn_fits_the_frames_and_all_fits_the_places(
    stretches: Stretches, must_pin: frozenset[int], extra: int, n_turns: int, most_guests: int
) -> None:
    used = {chunk for stretch in stretches for chunk in stretch}
    largest = max(len(set(stretch) - must_pin) for stretch in stretches)
    n_places = len(used & must_pin) + largest + extra
    usual = plan_for(stretches, n_places, must_pin)
    turns = turns_of(stretches, n_turns)
    plan = plan_turns(usual, stretches, turns, must_pin, most_guests) if usual.n_frames else None
    if plan is None:
        return
    assert len(plan.pinned) + plan.n_frames <= n_places
    assert len(plan.guests) <= most_guests
    assert plan.n_frames <= usual.n_frames
    streamed = set(plan.streamed)
    assert all(len(streamed.intersection(stretch)) <= plan.n_frames for stretch in stretches), "without guests too"
    assert sorted((*plan.pinned, *plan.streamed)) == sorted(used), "every chunk of the pass is planned once, no other"
    assert used & must_pin <= set(plan.pinned)
    assert set(plan.guests) <= set(plan.streamed)
    left = set(plan.streamed) - set(plan.guests)
    assert all(len(left.intersection(turn)) <= plan.n_frames for turn in turns)
    assert plan.streamed_uses == (len(left) if len(left) > plan.n_frames else 0), "what fits the frames stays there"


def test_turns_take_fewer_frames_and_read_less_than_running_ahead() -> None:
    stretches = chain(400)
    usual = plan_for(stretches, 380)
    plan = plan_turns(usual, stretches, turns_of(stretches, 5), frozenset(), 0)
    assert plan is not None
    assert (plan.n_frames, plan.streamed_uses) == (5, 25)
    assert plan.streamed_uses < usual.streamed_uses


def test_what_streams_of_a_turn_lies_together() -> None:
    stretches = chain(400)
    plan = plan_turns(plan_for(stretches, 380), stretches, turns_of(stretches, 5), frozenset(), 0)
    assert plan is not None
    assert plan.streamed == tuple(chunk for start in range(0, 400, 80) for chunk in range(start, start + 5))


def test_there_are_no_turns_where_one_would_not_fit_the_usual_window() -> None:
    stretches = chain(400)
    assert plan_turns(plan_for(stretches, 200), stretches, turns_of(stretches, 3), frozenset(), 0) is None
    assert plan_turns(plan_for(stretches, 380), stretches, turns_of(stretches, 1), frozenset(), 0) is None


def test_guests_stay_and_the_rest_streams_through_the_same_frames() -> None:
    stretches = chain(400)
    usual = plan_for(stretches, 200)
    plan = with_guests(usual, stretches, 50)
    assert len(plan.guests) == 50
    assert (plan.pinned, plan.streamed, plan.n_frames) == (usual.pinned, usual.streamed, usual.n_frames)
    assert plan.streamed_uses == usual.streamed_uses - 50
    gaps = [b - a for a, b in zip(plan.guests, plan.guests[1:], strict=False)]
    assert max(gaps) <= 2 * 400 // 50, "spread over the pass"


def test_with_room_for_all_as_guests_nothing_is_read() -> None:
    stretches = chain(100)
    plan = with_guests(plan_for(stretches, 80), stretches, 1000)
    assert set(plan.guests) == set(plan.streamed)
    assert plan.streamed_uses == 0


def test_what_streams_of_a_turn_has_many_neighbours() -> None:
    """Tensors are used in another order than they lie in: what is read at once is rather one long part than several."""
    turn = (40, 3, 9, 20, 21, 22, 23, 24, 25, 50, 30, 31, 32)
    stretches = [turn, *[tuple(range(60 + 12 * i, 72 + 12 * i)) for i in range(7)]]
    n_chunks = len({chunk for stretch in stretches for chunk in stretch})
    plan = plan_turns(plan_for(stretches, n_chunks - 21), stretches, stretches, frozenset(), most_guests=0)
    assert plan is not None
    streamed = [chunk for chunk in turn if chunk in plan.streamed]
    assert streamed == [20, 21, 22], "of the longest, the first"


def test_guests_are_where_they_need_no_frames_of_their_own() -> None:
    stretches = chain(400, per_stretch=10)
    turns = turns_of(stretches, 5)
    without = plan_turns(plan_for(stretches, 380), stretches, turns, frozenset(), 0)
    plan = plan_turns(plan_for(stretches, 280), stretches, turns, frozenset(), 100)
    assert without is not None
    assert plan is not None
    assert (plan.n_frames, plan.streamed_uses) == (without.n_frames, without.streamed_uses)
    assert len(plan.guests) == 100
