"""Reader threads: order, urgency, what they count, and an end that waits for what is in flight."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import SupportsIndex

import pytest

from clock import Clock
from edge_run.base.errors import Cancelled, TierReadError
from edge_run.base.interrupt import go_on
from edge_run.tiers.readers import AwaitedJob, Readers, ReadTotals
from waiting import until

WAIT_S = 30


class Gate:
    """A job that says when it began and ends when it is let through."""

    def __init__(self) -> None:
        self.has_begun, self._may_end = threading.Event(), threading.Event()

    def __call__(self) -> int:
        self.has_begun.set()
        assert self._may_end.wait(WAIT_S)
        return 1

    def open(self) -> None:
        self._may_end.set()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def readers(clock: Clock) -> Iterator[Readers]:
    one = Readers(1, clock)
    yield one
    one.close()


def finish(readers: Readers) -> None:
    """Wait until all that was submitted so far is done."""
    done = threading.Event()
    readers.submit(lambda: done.set() or 0)
    assert done.wait(WAIT_S)


def test_a_job_may_become_urgent_while_it_waits(readers: Readers) -> None:
    gate, order = Gate(), list[int]()
    readers.submit(gate)
    assert gate.has_begun.wait(WAIT_S)
    jobs: list[Callable[[], int]] = [lambda i=i: order.append(i) or 0 for i in range(5)]
    for job in jobs:
        readers.submit(job)
    for job in (jobs[3], jobs[1], gate):
        readers.hasten(job)
    gate.open()
    finish(readers)
    assert order == [3, 1, 0, 2, 4]


def test_first_come_first_served_but_for_the_urgent(readers: Readers) -> None:
    gate, order = Gate(), list[str]()
    readers.submit(gate)
    assert gate.has_begun.wait(WAIT_S)

    def note(name: str) -> Callable[[], int]:
        return lambda: order.append(name) or 0

    for name in ("first", "second"):
        readers.submit(note(name))
    readers.submit(note("urgent"), is_urgent=True)
    readers.submit(note("third"))
    gate.open()
    finish(readers)
    assert order == ["urgent", "first", "second", "third"]


def test_as_many_at_once_as_there_are_threads() -> None:
    readers, gates = Readers(3), [Gate() for _ in range(4)]
    for gate in gates:
        readers.submit(gate)
    assert all(gate.has_begun.wait(WAIT_S) for gate in gates[:3])
    assert not gates[3].has_begun.is_set()
    for gate in gates:
        gate.open()
    finish(readers)
    readers.close()


def test_of_idle_threads_the_one_that_came_last_takes_the_next_job() -> None:
    """Jobs that come one at a time are all done by one thread: whoever wakes another one loses time."""
    readers, names, seen = Readers(3), list[str](), set[str]()
    gates = [Gate() for _ in range(3)]
    for gate in gates:
        readers.submit(gate)
        assert gate.has_begun.wait(WAIT_S)
    for gate in gates:
        gate.open()
    until(lambda: len(readers._idle) == 3, WAIT_S)
    for _ in range(5):
        names.clear()
        readers.submit(lambda: names.append(threading.current_thread().name) or 0)
        until(lambda: len(names) == 1 and len(readers._idle) == 3, WAIT_S)
        seen.update(names)
    readers.close()
    assert len(seen) == 1


class Interrupted(list[threading.Lock]):
    """Ctrl-C comes when a thread was woken, before its bell is taken away."""

    def pop(self, index: SupportsIndex = -1) -> threading.Lock:
        raise KeyboardInterrupt


def test_ctrl_c_while_a_thread_is_woken_loses_neither_it_nor_its_job() -> None:
    readers, done = Readers(1), threading.Event()
    until(lambda: len(readers._idle) == 1, WAIT_S)
    readers._idle = Interrupted(readers._idle)
    with pytest.raises(KeyboardInterrupt):
        readers.submit(lambda: done.set() or 0)
    assert done.wait(WAIT_S)
    readers._idle = list(readers._idle)
    readers.close()


def test_threads_that_rest_take_no_jobs_until_they_are_active_again() -> None:
    readers, gates = Readers(2), [Gate() for _ in range(2)]
    readers.set_active(1)
    for gate in gates:
        readers.submit(gate)
    assert gates[0].has_begun.wait(WAIT_S)
    assert not gates[1].has_begun.wait(0.1)
    readers.set_active(2)
    assert gates[1].has_begun.wait(WAIT_S)
    for gate in gates:
        gate.open()
    readers.close()


def test_totals_count_bytes_and_the_time_in_which_anything_was_read(clock: Clock) -> None:
    """Two reads at once are one span of time: the bandwidth is that of the drive, not of a thread."""
    readers, gates = Readers(2, clock), [Gate(), Gate()]
    for gate in gates:
        readers.submit(gate)
        assert gate.has_begun.wait(WAIT_S)
    clock.now_s = 3.0
    assert readers.totals.busy_s == 3.0, "a read in flight counts up to now"
    for gate in gates:
        gate.open()
    readers.close()
    clock.now_s = 100.0
    totals = readers.totals
    assert (totals.bytes_read, totals.busy_s) == (2, 3.0)
    assert totals.cpu_s > 0


def test_idle_time_is_not_busy(readers: Readers, clock: Clock) -> None:
    finish(readers)
    clock.now_s = 50.0
    finish(readers)
    assert readers.totals.busy_s == 0.0


def test_what_was_added_between_two_moments() -> None:
    assert ReadTotals(10, 4.0, 0.5).since(ReadTotals(4, 1.0, 0.25)) == ReadTotals(6, 3.0, 0.25)


def test_closing_waits_for_what_is_in_flight_and_drops_the_rest() -> None:
    """Memory is unmapped after it: a read that still runs would write into whatever comes there next."""
    readers, gate, is_run = Readers(1), Gate(), threading.Event()
    readers.submit(gate)
    assert gate.has_begun.wait(WAIT_S)
    readers.submit(lambda: is_run.set() or 0)
    closing = threading.Thread(target=readers.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive(), "close returned while a read was in flight"
    gate.open()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert not is_run.is_set()
    readers.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edge-run-reader")]


class Pressing:
    """Somebody who presses Ctrl-C so often while this thread waits, each time when the last one was heard.

    then: is called when the last one was.
    """

    def __init__(self, n_times: int, then: Callable[[], object] = lambda: None) -> None:
        self._then = then
        self._n_times, self._heard, self._is_over = n_times, threading.Semaphore(0), False
        self._thread = threading.Thread(target=self._press)

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._hear)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()
        signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard.release()
        if not self._is_over:
            raise KeyboardInterrupt

    def _press(self) -> None:
        for _ in range(self._n_times):
            time.sleep(0.15)
            os.kill(os.getpid(), signal.SIGINT)
            assert self._heard.acquire(timeout=WAIT_S)
        self._then()


def test_who_insisted_on_an_end_while_a_read_hung_need_not_insist_again() -> None:
    readers, gate = Readers(1), Gate()
    readers.submit(gate)
    assert gate.has_begun.wait(WAIT_S)
    with Pressing(3), pytest.raises(KeyboardInterrupt):
        readers.close()
    began_s = time.monotonic()
    readers.close()
    assert time.monotonic() - began_s < WAIT_S / 2, "and not for the read, which ends after WAIT_S"
    assert [thread.is_alive() for thread in readers._threads] == [True], "the read hangs still"
    gate.open()
    for thread in readers._threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_who_pressed_ctrl_c_once_waits_for_what_is_in_flight() -> None:
    readers, gate = Readers(1), Gate()
    readers.submit(gate)
    assert gate.has_begun.wait(WAIT_S)
    timer = threading.Timer(0.3, gate.open)  # once it was pressed, and not before
    with Pressing(1, timer.start), pytest.raises(KeyboardInterrupt):
        readers.close()
    assert readers.totals.bytes_read == 1
    assert not any(thread.is_alive() for thread in readers._threads)
    timer.join()


def test_fewer_threads_read_while_others_rest_and_all_of_them_again() -> None:
    readers = Readers(3)
    try:
        readers.set_active(1)
        first, second = Gate(), Gate()
        readers.submit(first)
        assert first.has_begun.wait(WAIT_S)
        readers.submit(second)
        assert not second.has_begun.wait(0.1)
        readers.set_active(2)
        assert second.has_begun.wait(WAIT_S)
        readers.set_active(0)  # one at least
        first.open()
        second.open()
        finish(readers)
        readers.set_active(3)
        gates = [Gate() for _ in range(3)]
        for gate in gates:
            readers.submit(gate)
        assert all(gate.has_begun.wait(WAIT_S) for gate in gates)
        for gate in gates:
            gate.open()
    finally:
        readers.close()


def test_a_job_that_is_waited_for_tells_why_it_failed(readers: Readers) -> None:
    def fail() -> int:
        raise OSError(5, "Input/output error")

    good, bad = AwaitedJob(lambda: 7), AwaitedJob(fail)
    for job in (good, bad):
        readers.submit(job)
    assert good.wait(go_on) is None
    error = bad.wait(go_on)
    assert isinstance(error, TierReadError)
    assert "Input/output error" in str(error)
    assert bad.wait(go_on) is error, "it may be asked again"
    finish(readers)
    assert readers.totals.bytes_read == 7


def test_a_wait_for_a_job_that_is_stopped_leaves_the_job(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_run.tiers.readers.CHECK_S", 0.001)
    gate = Gate()
    job, checks = AwaitedJob(gate), iter([False, True])

    def check() -> None:
        if next(checks, False):
            raise Cancelled("stopped")

    readers.submit(job)
    with pytest.raises(Cancelled):
        job.wait(check)
    assert not job.has_ended
    gate.open()
    assert job.wait(check) is None
    assert job.has_ended


def test_a_stop_is_heard_where_the_job_has_ended_already(readers: Readers) -> None:
    """So that who waits for many fast jobs, one after the other, can be stopped between them."""
    job = AwaitedJob(lambda: 1)
    readers.submit(job)
    job.wait(go_on)

    def check() -> None:
        raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        job.wait(check)
