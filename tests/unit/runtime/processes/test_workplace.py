"""A workplace closes once nobody is at work, whoever asks, and one thread at a time frees what it is of."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from edge_run.base.errors import ConfigError
from edge_run.base.interrupt import Interrupt
from edge_run.runtime.processes.visitors import Visitors
from edge_run.runtime.processes.workplace import Workplace


def test_one_thread_at_a_time_frees() -> None:
    n_freeing = most = n_freed = 0

    def free() -> None:
        nonlocal n_freeing, most, n_freed
        n_freeing += 1
        most = max(most, n_freeing)
        time.sleep(0.05)
        n_freeing -= 1
        n_freed += 1

    place = Workplace("it", Interrupt(), free)
    threads = [threading.Thread(target=place.close, kwargs={"first": free}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert (most, n_freed) == (1, 2 * len(threads)), "what comes first, and the model, by each of them"


def test_who_was_at_work_last_is_not_taken_for_who_is() -> None:
    """It was told that it was at work itself."""
    place, has_begun, may_end = Workplace("it", Interrupt(), lambda: None), threading.Event(), threading.Event()
    place.do(lambda: None)

    def begin() -> None:
        with place._lock:  # the moment in which a thread begins
            has_begun.set()
            may_end.wait(60)

    thread = threading.Thread(target=begin)
    thread.start()
    assert has_begun.wait(60)
    with pytest.raises(ConfigError, match="in another thread"):
        place.do(lambda: None)
    threading.Timer(0.1, may_end.set).start()
    place.close()
    assert may_end.is_set()


def test_a_close_that_is_refused_closes_nothing() -> None:
    freed = list[int]()
    place = Workplace("it", Interrupt(), lambda: freed.append(1))

    def close() -> None:
        with pytest.raises(ConfigError, match="in the call that this one comes from"):
            place.close()

    place.do(close)
    place.check()
    assert not freed
    place.close()
    assert freed == [1]
    with pytest.raises(ConfigError, match="closed"):
        place.do(lambda: None)


@contextlib.contextmanager
def visiting(visitors: Visitors) -> Iterator[threading.Event]:
    """Another thread visits until the event is set, or the block ends."""
    has_come, may_leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=visitors.visit, args=(lambda: (has_come.set(), may_leave.wait(60)),), daemon=True)
    thread.start()
    assert has_come.wait(60)
    yield may_leave
    may_leave.set()
    thread.join(60)
    assert not thread.is_alive()


def test_nothing_is_freed_under_a_visitor_and_nobody_comes_any_more() -> None:
    freed, visitors = list[bool](), Visitors("it")
    with visiting(visitors) as may_leave:
        place = Workplace("it", Interrupt(), lambda: freed.append(may_leave.is_set()), visitors)
        assert visitors.visit(lambda: place.do(lambda: "done")) == "done", "one does not wait for another"
        place.close(timeout_s=0)
        assert not freed, "it took too long"
        with pytest.raises(ConfigError, match="it: this model was closed"):
            visitors.visit(lambda: None)
        threading.Timer(0.1, may_leave.set).start()
        place.close()
    assert freed == [True]


def test_a_visitor_who_closes_is_refused_and_who_fails_has_left() -> None:
    freed, visitors = list[int](), Visitors("it")
    place = Workplace("it", Interrupt(), lambda: freed.append(1), visitors)
    with pytest.raises(ConfigError, match="in the call that this one comes from"):
        visitors.visit(place.close)
    place.check()
    assert not freed
    place.close()
    assert freed == [1]
