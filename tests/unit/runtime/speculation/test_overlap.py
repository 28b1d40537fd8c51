"""Guesses made beside a pass: which of them are used, when they are made at all, and that nothing is left running."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from edge_run.base.errors import BudgetError
from edge_run.base.interrupt import JoinedThread
from edge_run.runtime.speculation.drafting import Acceptance, Guess, Guesses, WantedGuesses
from edge_run.runtime.speculation.overlap import OFF, ON, Overlap, following

WAIT_S = 10
WANTED = WantedGuesses(4, 8, Acceptance())


def guess(value: float) -> Guess:
    return Guess(value, ("test", 0, 0), value)


class Drafter:
    """Guesses 1 and 2 after anything, and after 1 also 3; beside a pass it waits until it is told to end."""

    once_s = 0.5

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.aside: list[list[int]] = []
        self.prepared: list[tuple[list[int], int]] = []
        self.numbers = set[int]()  # of the texts
        self.began = threading.Event()
        self.fails, self.has_room = False, True

    def prepare(self, texts: Mapping[int, Sequence[int]], most_depth: int) -> bool:
        assert not self.began.is_set(), "before the pass, and not beside it"
        self.prepared.append((self._noted(texts), most_depth))
        return self.has_room

    def draft_many(self, texts: Mapping[int, Sequence[int]], wanted: WantedGuesses) -> dict[int, Guesses]:
        self.asked.append(self._noted(texts))
        (number,) = texts
        return {number: {(1,): guess(0.5), (2,): guess(0.3), (1, 3): guess(0.4)}}

    def _noted(self, texts: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the only text."""
        ((number, text),) = texts.items()
        self.numbers.add(number)
        return list(text)

    def draft_aside(
        self, texts: Mapping[int, Sequence[int]], wanted: WantedGuesses, end: threading.Event
    ) -> dict[int, Guesses]:
        self.aside.append(self._noted(texts))
        self.began.set()
        assert end.wait(WAIT_S)
        if self.fails:
            raise RuntimeError("no")
        guesses = self.draft_many(texts, wanted)
        self.asked.pop()
        return guesses


def overlapping(drafter: Drafter) -> Overlap:
    """Return an overlap that has been told that guessing is worth it, and is on."""
    overlap = Overlap(drafter)
    for _ in range(100):
        if overlap.is_on and overlap._guessing_s > 0:
            return overlap
        overlap.note(0.1, 1.0, 0.8, 4)
    raise AssertionError("it was never on")


def run_pass(overlap: Overlap, drafter: Drafter, text: list[int], number: int = 0) -> None:
    overlap.draft(text, WANTED, number)
    with overlap.going_on(text):
        assert drafter.began.wait(WAIT_S)
    assert not [thread for thread in threading.enumerate() if thread.name == "edge-run-overlap"]


@pytest.mark.parametrize("number", [0, 3])
def test_what_follows_the_token_that_came_is_used(number: int) -> None:
    drafter = Drafter()
    overlap = overlapping(drafter)
    run_pass(overlap, drafter, [7, 8], number)
    drafter.asked.clear()
    assert overlap.draft([7, 8, 1], WANTED, number) == {(3,): Guess(0.8, ("test", 0, 0), 0.4)}
    assert drafter.asked == []
    guesses = overlap.draft([7, 8, 1], WANTED, number)  # once only
    assert drafter.asked == [[7, 8, 1]]
    assert guesses == {(1,): guess(0.5), (2,): guess(0.3), (1, 3): guess(0.4)}
    assert drafter.numbers == {number}


def test_what_was_guessed_beside_a_pass_had_nothing_to_read_first() -> None:
    drafter = Drafter()
    overlap = overlapping(drafter)
    run_pass(overlap, drafter, [7, 8])
    assert overlap.once_s == 0.5
    overlap.draft([7, 8, 1], WANTED)
    assert overlap.once_s == 0.0


@pytest.mark.parametrize("came", [[7, 8, 2], [7, 8, 9], [7, 9, 1], [7, 8], [7, 8, 1, 3], [1]])
def test_what_was_refuted_or_ends_too_soon_is_dropped(came: list[int]) -> None:
    drafter = Drafter()
    overlap = overlapping(drafter)
    run_pass(overlap, drafter, [7, 8])
    drafter.asked.clear()
    overlap.draft(came, WANTED)
    assert drafter.asked == [came]


def test_a_drafter_that_fails_beside_a_pass_guesses_as_ever() -> None:
    drafter = Drafter()
    overlap = overlapping(drafter)
    drafter.fails = True
    run_pass(overlap, drafter, [7, 8])
    assert overlap.draft([7, 8, 1], WANTED)


def test_a_pass_that_fails_leaves_nothing_running() -> None:
    drafter = Drafter()
    overlap = overlapping(drafter)

    def fail() -> None:
        with overlap.going_on([7]):
            assert drafter.began.wait(WAIT_S)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not [thread for thread in threading.enumerate() if thread.name == "edge-run-overlap"]


def test_ctrl_c_while_the_drafter_is_started_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, start = Drafter(), JoinedThread.start
    overlap = overlapping(drafter)

    def interrupted(thread: JoinedThread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(JoinedThread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), overlap.going_on([7]):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "edge-run-overlap"]


def test_ctrl_c_at_the_end_of_a_pass_waits_for_the_drafter() -> None:
    """Else it would go on in a context that is freed, or used, by then."""
    main, ended = threading.main_thread().ident, threading.Event()
    assert main is not None

    class Slow(Drafter):
        def draft_aside(self, *given: Any) -> Guesses:
            guesses = super().draft_aside(*given)
            time.sleep(0.1)
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.3)
            ended.set()
            return guesses

    drafter = Slow()
    overlap = overlapping(drafter)
    with pytest.raises(KeyboardInterrupt):
        run_pass(overlap, drafter, [7])
    assert ended.is_set()


@pytest.mark.parametrize("what", ["threads", "room"])
def test_a_pass_goes_on_where_nothing_can_be_guessed_beside_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, computed = Drafter(), False
    overlap = overlapping(drafter)

    def refuse(*_: object) -> bool:
        raise RuntimeError("can't start new thread") if what == "threads" else BudgetError("no room")

    monkeypatch.setattr(*((threading.Thread, "start") if what == "threads" else (drafter, "prepare")), refuse)
    with overlap.going_on([7]):
        computed = True
    assert computed
    assert drafter.aside == []


@pytest.mark.parametrize(("guessing_s", "wait_s"), [(0.01, 0.8), (0.3, 0.3)])
def test_it_is_not_tried_where_guessing_takes_next_to_nothing_or_passes_hardly_wait(
    guessing_s: float, wait_s: float
) -> None:
    """Where they do not wait, their cores have no time for guesses."""
    drafter = Drafter()
    overlap = Overlap(drafter)
    for _ in range(400):
        overlap.note(guessing_s, 1.0, wait_s, 4)
        with overlap.going_on([7]):
            pass
    assert drafter.aside == []
    assert overlap.decisions == ()


def test_a_pass_is_a_trial_until_guessing_beside_passes_was_found_to_pay() -> None:
    drafter = Drafter()
    overlap, n_trials = Overlap(drafter), 0
    for _ in range(400):
        overlap.draft([7], WANTED)
        drafter.began.clear()
        with overlap.going_on([7]):
            pass
        is_beside = drafter.began.wait(WAIT_S) if overlap.is_on else False
        assert overlap.was_trial == (is_beside and not overlap.decisions)
        n_trials += overlap.was_trial
        overlap.note(0.3, 0.8 if is_beside else 1.0, 0.0 if is_beside else 0.7, 4)
        assert not overlap.was_trial
        if is_beside and overlap.decisions:
            break
    assert n_trials > 0
    assert overlap.decisions[0].setting == ON


@pytest.mark.parametrize(("beside_s", "found"), [(0.2, ON), (-0.2, OFF)])
def test_it_stays_where_it_was_measured_to_be_faster(beside_s: float, found: str) -> None:
    overlap = Overlap(Drafter())
    for number in range(400):
        noise = 0.001 * (number * 7919 % 13)
        overlap.note(0.3, 1.0 + noise - (beside_s if overlap.is_on else 0.0), 0.7, 4)
    first, *later = overlap.decisions
    assert (first.tunable, first.setting, first.tried) == ("overlap", found, ON)
    assert (first.gain > 0) == (found == ON)
    assert all(decision.setting == found for decision in later)  # also when it is tried again the other way round


def test_values_are_chances_after_the_token() -> None:
    guesses = {(1,): guess(0.5), (1, 2): guess(0.25), (1, 2, 3): guess(0.2), (4,): guess(0.1), (4, 5): guess(0.05)}
    assert following([0], guesses, [0, 1]) == {
        (2,): Guess(0.5, ("test", 0, 0), 0.25),
        (2, 3): Guess(0.4, ("test", 0, 0), 0.2),
    }
    assert following([0], guesses, [0, 4]) == {}  # less deep than the best


def test_room_is_made_before_the_pass_for_as_deep_a_path_as_is_guessed_beside_it() -> None:
    drafter = Drafter()
    overlap = overlapping(drafter)
    run_pass(overlap, drafter, [7, 8])
    assert drafter.prepared == [([7, 8], 5)]


def test_nothing_is_guessed_beside_a_pass_where_there_is_no_room() -> None:
    drafter = Drafter()
    overlap = overlapping(drafter)
    drafter.has_room = False
    overlap.draft([7, 8], WANTED)
    with overlap.going_on([7, 8]):
        assert not [thread for thread in threading.enumerate() if thread.name == "edge-run-overlap"]
    assert drafter.aside == []
