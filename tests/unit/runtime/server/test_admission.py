"""Who is let in, and how long the others are told to wait."""

from __future__ import annotations

import contextlib

import pytest

from clock import Clock
from edge_run.runtime.server.admission import Admission
from edge_run.runtime.server.refusals import Refusal

pytestmark = pytest.mark.anyio


def refusal(admission: Admission) -> Refusal:
    with pytest.raises(Refusal) as caught, admission.place():
        pass
    return caught.value


async def test_so_many_may_wait_and_those_that_are_answered_do_not_count() -> None:
    admission = Admission(max_queue=1)
    admission.expect(7.0)
    with contextlib.ExitStack() as places:
        first, second = (places.enter_context(admission.place()) for _ in range(2))
        full = refusal(admission)
        assert (full.status, full.headers()["retry-after"], full.headers()["x-should-retry"]) == (429, "7", "true")
        first.begin()
        assert (admission.n_running, admission.n_waiting) == (1, 1)
        with admission.place():
            assert refusal(admission).status == 429
        second.begin()
        assert (admission.n_running, admission.n_waiting) == (2, 0)
    assert (admission.n_running, admission.n_waiting) == (0, 0)


async def test_a_queue_of_nobody_answers_one_at_a_time() -> None:
    admission = Admission(max_queue=0)
    with admission.place():
        assert refusal(admission).status == 429


async def test_a_key_is_refused_above_its_share_of_a_full_queue_only() -> None:
    admission = Admission(max_queue=12)

    def fill(key: str) -> int:
        n_before = admission.n_waiting
        with contextlib.suppress(Refusal):
            for _ in range(100):
                places.enter_context(admission.place(key=key))
        return admission.n_waiting - n_before

    with contextlib.ExitStack() as places:
        assert [fill(key) for key in "abcd"] == [13, 7, 5, 0]  # above 12, a half of them, a third; then 25 are there
        assert [fill(key) for key in "ab"] == [0, 0]
    assert admission.n_waiting == 0


async def test_the_wait_is_learnt_from_answers() -> None:
    clock = Clock()
    admission = Admission(max_queue=0, clock=clock)
    assert admission.expected_wait_s == 10.0
    for _ in range(50):
        with admission.place() as place:
            place.begin()
            clock.now_s += 100.0
    assert admission.expected_wait_s == pytest.approx(100.0, rel=0.01)
    with admission.place():
        clock.now_s += 1e6  # it failed before it had a token: that says nothing of answers
    assert admission.expected_wait_s == pytest.approx(100.0, rel=0.01)


async def test_when_it_is_closed_nobody_comes_in_and_who_is_there_may_stay() -> None:
    admission = Admission(max_queue=5)
    with admission.place() as place:
        admission.close()
        closed = refusal(admission)
        assert (closed.status, closed.headers()["connection"]) == (503, "close")
        assert not place.scope.cancel_called
        admission.cancel()
        assert place.scope.cancel_called
