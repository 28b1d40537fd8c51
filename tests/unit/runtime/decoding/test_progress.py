"""How far the work at hand is, and how long it will still take."""

from __future__ import annotations

import dataclasses

import pytest

from edge_run.base.results import Plan, Progress
from edge_run.runtime.decoding.progress import Step, Timeline, pass_steps
from edge_run.runtime.llama.context_shape import ContextShape

SHAPE = ContextShape(1024, 1, 64, 1, 1, "f16", "f16", "auto")
STREAMED = Plan("streamed", 1000, 100, 800, 500, 50, 300, 10, 1024, 4)
RESIDENT = dataclasses.replace(STREAMED, mode="resident", streamed_bytes_per_pass=0)


class Work:
    """A timeline under a clock and a share that the test sets."""

    def __init__(self) -> None:
        self.now_s = self.share = 0.0
        self.timeline = Timeline(lambda: self.share, lambda: self.now_s)

    def look(self) -> Progress:
        progress = self.timeline.snapshot()
        assert progress is not None
        return progress


@pytest.fixture
def work() -> Work:
    return Work()


def test_nothing_is_at_hand_before_the_beginning_and_after_the_end(work: Work) -> None:
    assert work.timeline.snapshot() is None
    work.timeline.begin([Step("prompt", 1, 1.0)])
    assert work.look().share == 0
    work.timeline.advance()
    assert work.timeline.snapshot() is None
    work.timeline.begin([Step("prompt", 1, 1.0)])
    work.timeline.end()
    assert work.timeline.snapshot() is None


def test_what_remains_is_what_was_expected_while_nothing_is_done(work: Work) -> None:
    work.timeline.begin([Step("reading", 64, 8.0), Step("prompt", 16, 2.0)], is_timed=True)
    assert work.look() == Progress("reading", 0, 80, 0.0, 0.0, 10.0)


def test_the_pace_that_is_seen_counts_more_and_more(work: Work) -> None:
    """Everything takes twice as long as was expected."""
    work.timeline.begin([Step("reading", 64, 8.0), Step("prompt", 16, 2.0)], is_timed=True)
    work.now_s, work.share = 8.0, 0.5
    assert work.look().remaining_s == pytest.approx(6.0 * (0.4 * 2 + 0.6))
    work.timeline.advance()
    work.now_s, work.share = 16.0, 0.0
    assert work.look().done_tokens == 64
    assert work.look().remaining_s == pytest.approx(2.0 * (0.8 * 2 + 0.2))


def test_without_expected_times_nothing_is_said_before_something_is_done(work: Work) -> None:
    work.timeline.begin([Step("reading", 1, 800.0), Step("prompt", 1, 300.0)])
    work.now_s = 1.0
    assert work.look().remaining_s is None
    work.share = 0.5
    assert work.look().remaining_s == pytest.approx(700 / 400)


def test_a_streamed_model_is_read_in_its_first_pass() -> None:
    steps = pass_steps(STREAMED, None, 150, 0, SHAPE, is_unread=True)
    assert steps == [Step("reading", 64, 800.0), Step("prompt", 64, 300.0), Step("prompt", 22, 300.0)]
    assert pass_steps(STREAMED, None, 1, 150, SHAPE, is_unread=False) == [Step("prompt", 1, 300.0)]


def test_a_model_that_stays_is_read_before_its_first_pass() -> None:
    steps = pass_steps(RESIDENT, None, 65, 0, SHAPE, is_unread=True)
    assert [(step.stage, step.tokens) for step in steps] == [("reading", 0), ("prompt", 64), ("prompt", 1)]
    assert len(pass_steps(RESIDENT, None, 65, 0, SHAPE, is_unread=False)) == 2


def test_who_wants_to_know_is_told_up_to_where_tokens_are_done_and_may_look(work: Work) -> None:
    told = list[tuple[int, Progress | None]]()
    with work.timeline.telling(lambda position: told.append((position, work.timeline.snapshot()))):
        work.timeline.begin([Step("reading", 0, 1.0), Step("prompt", 64, 1.0), Step("prompt", 22, 1.0)], position=12)
        for _ in range(3):
            work.timeline.advance()
        work.timeline.end()
        work.timeline.begin([Step("prompt", 1, 1.0)], position=98)
    work.timeline.advance()
    assert [position for position, _ in told] == [12, 12, 76, 98, 98]
    assert [now and now.done_tokens for _, now in told] == [0, 0, 64, None, 0]


def test_a_step_costs_the_same_however_many_there_were_before_it(work: Work) -> None:
    """A long prompt may be read a token a pass."""
    looks = 0

    class Counted(Step):
        __slots__ = ()

        def __getattribute__(self, name: str) -> object:
            nonlocal looks
            looks += name == "tokens"
            return super().__getattribute__(name)

    told = list[int]()
    with work.timeline.telling(told.append):
        work.timeline.begin([Counted("prompt", 1, 1.0)] * 500, position=3)
        for _ in range(500):
            work.timeline.advance()
    assert told == [*range(3, 504)]
    assert looks <= 1000
