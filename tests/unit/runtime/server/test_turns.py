"""Whose turn it is: requests for one model go together, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from clock import Clock
from edge_run.base.errors import ModelFileError
from edge_run.runtime.server.catalogue.turns import LEAST_PATIENCE_S, OPENINGS, ModelChange, ModelTurn, Turns


def turns_with(name: str) -> tuple[Turns, Clock]:
    """Return turns of which the model `name` is open, and used by nobody."""
    clock = Clock()
    turns = Turns(clock)
    turns.opened(name)
    return turns, clock


def test_the_first_request_opens_its_model_and_all_that_wait_for_it_go_on() -> None:
    turns = Turns(Clock())
    first = turns.ask("a")
    assert turns.decide() == ModelChange("a")
    second = turns.ask("a")
    assert turns.decide() is None
    turns.opened("a")
    assert first.is_in
    assert second.is_in


def test_others_wait_until_the_running_ones_are_done() -> None:
    turns, _ = turns_with("a")
    running, other = turns.ask("a"), turns.ask("b")
    assert turns.decide() is None
    assert (running.is_in, other.is_in) == (True, False)
    turns.leave(running)
    assert turns.decide() == ModelChange("b")
    turns.opened("b")
    assert other.is_in


def test_newcomers_are_let_in_for_a_while_only() -> None:
    turns, clock = turns_with("a")
    running, other = turns.ask("a"), turns.ask("b")
    turns.decide()
    clock.now_s = LEAST_PATIENCE_S - 0.1
    early = turns.ask("a")
    turns.decide()
    assert early.is_in
    clock.now_s = LEAST_PATIENCE_S
    late = turns.ask("a")
    turns.decide()
    assert not late.is_in
    for turn in (running, early):
        assert turns.decide() is None
        turns.leave(turn)
    assert turns.decide() == ModelChange("b")
    turns.opened("b", took_s=10.0)
    assert other.is_in
    clock.now_s += OPENINGS * 10.0 - 0.1
    second = turns.ask("b")
    turns.decide()
    assert second.is_in, "what took long to open stays open for longer"


def test_when_the_others_have_left_those_that_were_held_back_go_on() -> None:
    turns, clock = turns_with("a")
    running, other = turns.ask("a"), turns.ask("b")
    turns.decide()
    clock.now_s = 100.0
    late = turns.ask("a")
    turns.decide()
    turns.leave(other)
    assert turns.decide() is None
    assert late.is_in
    assert running.is_in


def test_who_waits_for_what_cannot_be_opened_is_told_and_the_others_go_on() -> None:
    turns = Turns(Clock())
    broken, other = turns.ask("broken"), turns.ask("a")
    assert turns.decide() == ModelChange("broken")
    turns.failed("broken", ModelFileError("it is broken"))
    assert isinstance(broken.error, ModelFileError)
    assert turns.decide() == ModelChange("a")
    turns.opened("a")
    assert other.is_in


def test_a_model_that_is_to_be_closed_is_closed_when_it_is_idle() -> None:
    turns, _ = turns_with("a")
    running = turns.ask("a")
    turns.decide()
    turns.close_when_idle()
    late = turns.ask("a")
    assert turns.decide() is None
    assert not late.is_in
    turns.leave(running)
    assert turns.decide() == ModelChange("a"), "and opened anew for who came meanwhile"
    turns.leave(late)
    turns.opened("a")
    turns.close_when_idle()
    assert turns.decide() == ModelChange(None)
    turns.closed()
    assert turns.decide() is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=60))
def test_nobody_waits_longer_than_each_other_model_may_take(asked: list[tuple[str, int, int]]) -> None:
    """Requests of so many seconds each, so many seconds after the one before: each begins within the bound."""
    turns, clock = Turns(Clock()), Clock()
    turns.clock = clock
    left: dict[ModelTurn, int] = {}  # seconds
    coming, opens_s = list(asked), 0.0
    change: ModelChange | None = None
    next_s = float(coming[0][2])
    while coming or left:
        if coming and clock.now_s >= next_s:
            name, length, _ = coming.pop(0)
            left[turns.ask(name)] = length
            next_s = clock.now_s + (coming[0][2] if coming else 0)
            found = turns.decide()
            change, opens_s = (found, clock.now_s + 1) if found else (change, opens_s)
            continue
        clock.now_s += 1
        if change is not None and clock.now_s >= opens_s:
            assert change.name is not None
            turns.opened(change.name, took_s=1.0)
            change = None
        for turn in [turn for turn in left if turn.is_in]:
            assert turn.name == turns.open
            left[turn] -= 1
            if not left[turn]:
                del left[turn]
                turns.leave(turn)
        for turn in left:
            assert turn.is_in or clock.now_s - turn.since_s <= 3 * (LEAST_PATIENCE_S + 20 + 1) + 1
        found = turns.decide()
        change, opens_s = (found, clock.now_s + 1) if found else (change, opens_s)
