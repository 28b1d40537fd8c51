"""Interrupts: Ctrl-C and cancels are noted, who asks is told, and nothing is raised anywhere else."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest

from edge_run.base.errors import Cancelled, system_errors
from edge_run.base.interrupt import Interrupt, JoinedThread, join_all, on_ctrl_c


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """A shell that starts tests in the background has Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_cancel_from_any_thread_is_told_at_once_and_lasts_until_other_work_begins() -> None:
    interrupt, heard = Interrupt(), list[bool]()
    interrupt.tell(heard.append)
    interrupt.check()
    thread = threading.Thread(target=interrupt.cancel)
    thread.start()
    thread.join()
    for _ in range(2):
        with pytest.raises(Cancelled):
            interrupt.check()
    interrupt.reset()
    interrupt.check()
    assert heard == [True, False]


def hearing(interrupt: Interrupt, *work: Callable[[], object]) -> None:
    """Do `work`, one after the other."""
    with interrupt.hearing_signals():
        for step in work:
            step()


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_is_noted_and_raised_at_the_end_of_the_block() -> None:
    interrupt, steps = Interrupt(), list[str]()

    def go_on() -> None:
        interrupt.reset()
        assert interrupt.is_set, "other work within does not make it unsaid"
        with pytest.raises(Cancelled):
            interrupt.check()
        steps.append("to the end")

    with pytest.raises(KeyboardInterrupt):
        hearing(interrupt, press, go_on)
    assert steps == ["to the end"]
    assert not interrupt.is_set
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_a_block_raises_because_of_ctrl_c_is_ctrl_c_and_all_else_is_itself() -> None:
    interrupt = Interrupt()
    with pytest.raises(KeyboardInterrupt):
        hearing(interrupt, press, interrupt.check)
    with pytest.raises(ZeroDivisionError):
        hearing(interrupt, lambda: 1 // 0)
    with pytest.raises(Cancelled):
        hearing(interrupt, interrupt.cancel, interrupt.check)
    assert interrupt.is_set, "nobody has begun anything else"


def test_a_handler_that_is_not_pythons_own_stays() -> None:
    """As in a background job, which ignores it, and in an outer block, which hears it for the inner one."""
    outer, inner, heard = Interrupt(), Interrupt(), list[tuple[bool, bool]]()
    with pytest.raises(KeyboardInterrupt):
        hearing(outer, lambda: hearing(inner, press), lambda: heard.append((outer.is_set, inner.is_set)))
    assert heard == [(True, False)]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with outer.hearing_signals(), on_ctrl_c(outer.cancel):
            press()
        assert not outer.is_set
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def terminated() -> Iterator[list[str]]:
    """What a program's own handler of SIGTERM noted, which then ends the program."""
    noted = list[str]()

    def end(number: int, frame: object) -> None:
        noted.append(signal.Signals(number).name)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    yield noted
    signal.signal(signal.SIGTERM, before)


def test_what_a_programs_own_handler_raises_is_raised_at_the_end_of_the_block(terminated: list[str]) -> None:
    """Within a callback of llama.cpp's it would be lost, and what the callback was to do with it."""
    handler, interrupt, steps = signal.getsignal(signal.SIGTERM), Interrupt(), list[bool]()

    def press_it() -> None:
        signal.raise_signal(signal.SIGTERM)
        steps.append(interrupt.is_set)

    with pytest.raises(SystemExit, match="143"):
        hearing(interrupt, press_it, lambda: steps.append(True))
    assert (terminated, steps, interrupt.is_set) == (["SIGTERM"], [True, True], False)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_handler_that_raises_nothing_ends_nothing() -> None:
    heard, interrupt = list[int](), Interrupt()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        hearing(interrupt, lambda: signal.raise_signal(signal.SIGUSR1), interrupt.check)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]


def test_of_two_that_raise_the_one_that_ends_the_program_is_raised(terminated: list[str]) -> None:
    def give_up(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    numbers = [signal.SIGTERM, signal.SIGALRM]
    try:
        for order in (numbers, numbers[::-1]):
            with pytest.raises(SystemExit):
                hearing(Interrupt(), *[partial(signal.raise_signal, number) for number in order])
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_handler_that_is_set_within_the_block_stays(terminated: list[str]) -> None:
    """As by a program that a second signal is to kill."""
    hearing(Interrupt(), lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_was_found_within_the_block_and_put_back_later_raises_itself(terminated: list[str]) -> None:
    found, interrupt = list[Any](), Interrupt()
    hearing(interrupt, lambda: found.append(signal.signal(signal.SIGTERM, signal.SIG_DFL)))
    signal.signal(signal.SIGTERM, *found)
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    assert not interrupt.is_set
    with pytest.raises(SystemExit):
        hearing(interrupt, lambda: signal.raise_signal(signal.SIGTERM), lambda: interrupt.is_set or 1 // 0)


def test_what_a_handler_raises_is_not_taken_for_what_the_system_refused() -> None:
    def refuse(*_: object) -> None:
        raise OSError("given up")

    before = signal.signal(signal.SIGALRM, refuse)
    try:
        with pytest.raises(OSError, match=r"^given up$"), system_errors("reading"):
            hearing(Interrupt(), lambda: signal.raise_signal(signal.SIGALRM))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_all_handlers_are_put_back_whatever_they_raise_meanwhile(
    terminated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, interrupt, real = signal.getsignal(signal.SIGTERM), Interrupt(), signal.signal

    def put_back(number: int, new: object) -> object:
        before = real(number, new)  # type: ignore[arg-type]
        if new is handler and not terminated:
            signal.raise_signal(number)  # at the first moment in which it raises again
        return before

    monkeypatch.setattr("edge_run.base.interrupt._set_handler", put_back)
    with pytest.raises(SystemExit), interrupt.hearing_signals():
        pass
    assert terminated
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == (handler, signal.default_int_handler)


def test_other_threads_hear_no_signals() -> None:
    interrupt, handlers = Interrupt(), list[object]()

    def work() -> None:
        with interrupt.hearing_signals():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_ctrl_c_may_mean_something_else() -> None:
    interrupt = Interrupt()
    with on_ctrl_c(interrupt.cancel):
        press()
    assert interrupt.is_set
    with pytest.raises(KeyboardInterrupt):
        press()


def test_ctrl_c_that_comes_while_an_error_leaves_the_block_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt, real = Interrupt(), signal.signal

    def late(number: int, handler: object) -> object:
        if handler is signal.default_int_handler:  # at the last moment in which the block's own handler is there
            press()
        return real(number, handler)  # type: ignore[arg-type]

    monkeypatch.setattr("edge_run.base.interrupt._set_handler", late)
    with pytest.raises(KeyboardInterrupt), interrupt.hearing_signals():
        raise ValueError
    monkeypatch.undo()
    assert not interrupt.is_set


def pressed_while_joining(
    n_times: int, work: Callable[[], object], n_threads: int = 1, pressed: Callable[[], object] = lambda: None
) -> list[JoinedThread]:
    """Join threads at `work` while Ctrl-C is pressed so often, then call `pressed`: KeyboardInterrupt must come.

    It is pressed again once it was heard: two at once are one for a thread that others keep from its core.
    """
    main, heard = threading.main_thread().ident, threading.Semaphore(0)
    assert main is not None

    def hear(number: int, frame: FrameType | None) -> None:
        heard.release()
        raise KeyboardInterrupt

    threads = [JoinedThread(work, f"worker {number}") for number in range(n_threads)]

    def press_often() -> None:
        for _ in range(n_times):
            time.sleep(0.05)
            signal.pthread_kill(main, signal.SIGINT)
            assert heard.acquire(timeout=60)
        pressed()

    for thread in threads:
        thread.start()
    presser = threading.Thread(target=press_often)

    def join_pressed() -> None:
        presser.start()
        join_all(threads)

    before = signal.signal(signal.SIGINT, hear)
    try:
        with pytest.raises(KeyboardInterrupt):
            join_pressed()
        presser.join()
    finally:
        signal.signal(signal.SIGINT, before)
    return threads


def test_ctrl_c_waits_until_the_threads_have_ended() -> None:
    done, pressed = list[bool](), threading.Event()

    def work() -> None:
        assert pressed.wait(60)
        time.sleep(0.2)
        done.append(True)

    threads = pressed_while_joining(2, work, n_threads=3, pressed=pressed.set)
    assert done == 3 * [True]
    assert not any(thread.is_alive() for thread in threads)


def test_who_insists_need_not_wait_for_what_hangs() -> None:
    end = threading.Event()
    (thread,) = pressed_while_joining(3, lambda: end.wait(60))
    assert not thread.has_ended.is_set()
    end.set()
    assert thread.has_ended.wait(60)


@pytest.mark.parametrize("deadline_s", [1e10, threading.TIMEOUT_MAX, 1e308, math.inf])
def test_a_deadline_beyond_what_threads_can_wait_for_is_never(deadline_s: float) -> None:
    """A thread that waited for it ended with a traceback on standard error."""
    interrupt = Interrupt()
    with interrupt.cancelling_at(time.monotonic() + deadline_s):
        time.sleep(0.05)
    interrupt.check()


def test_a_deadline_cancels_what_is_not_done() -> None:
    interrupt = Interrupt()
    with interrupt.cancelling_at(time.monotonic() + 60):
        pass
    interrupt.check()
    until_s = time.monotonic() + 60
    with interrupt.cancelling_at(time.monotonic() + 0.01):
        while not interrupt.is_set and time.monotonic() < until_s:
            time.sleep(0.001)
    assert interrupt.is_set


def test_a_cancel_beside_a_reset_is_told_last() -> None:
    """Whoever computes is told in the order in which threads happen to go on."""
    interrupt, told = Interrupt(), [False]

    def hear(is_set: bool) -> None:
        if not is_set and not interrupt.is_set:  # another thread cancels before this one has said what it was to say
            interrupt.cancel()
        told[0] = is_set

    interrupt.tell(hear)
    interrupt.reset()
    assert interrupt.is_set
    assert told == [True]
