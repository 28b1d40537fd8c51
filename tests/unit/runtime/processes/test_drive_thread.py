"""A thread for a drive that may hang: it says what came of it, and nobody waits for it who needs no answer any more."""

from __future__ import annotations

import gc
import threading
import weakref
from importlib.util import find_spec

import anyio
import anyio.to_thread
import pytest

from edge_run.base.errors import TierReadError
from edge_run.runtime.processes.drive_thread import at_drive
from waiting import until

LIMIT_S = 60.0
TRIO = pytest.param("trio", marks=pytest.mark.skipif(find_spec("trio") is None, reason="trio is not installed"))
BACKENDS = pytest.mark.parametrize("backend", ["asyncio", TRIO])


class Told(Exception):
    """What a drive says."""


@BACKENDS
def test_what_a_function_returns_or_raises_comes_out(backend: str) -> None:
    def fail(number: int) -> None:
        raise Told(number)

    async def main() -> None:
        with anyio.fail_after(LIMIT_S):
            assert await at_drive(divmod, 7, 2) == (3, 1)
            assert await at_drive(threading.get_ident) != threading.get_ident()
            with pytest.raises(Told, match=r"^7$"):
                await at_drive(fail, 7)

    anyio.run(main, backend=backend)


@BACKENDS
def test_a_drive_that_hangs_is_left_and_its_late_words_are_for_nobody(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, answers, unheard = threading.Event(), threading.Event(), list[object]()
    left = list[threading.Thread]()
    monkeypatch.setattr(threading, "excepthook", unheard.append)

    def hang() -> None:
        left.append(threading.current_thread())
        began.set()
        answers.wait(LIMIT_S)
        raise Told("late")

    async def leave() -> None:
        began.clear()
        async with anyio.create_task_group() as group:
            group.start_soon(at_drive, hang, name="drive")
            assert await anyio.to_thread.run_sync(began.wait, LIMIT_S)
            group.cancel_scope.cancel()
        assert left[-1].is_alive()

    async def main() -> None:
        await leave()
        answers.set()  # of the first while its loop runs, of the second after it
        await anyio.to_thread.run_sync(left[0].join, LIMIT_S)
        answers.clear()
        await leave()

    try:
        anyio.run(main, backend=backend)
        assert left[1].is_alive()
        assert left[1].daemon, "the process does not wait for it at its end"
    finally:
        answers.set()
    until(lambda: not left[1].is_alive())
    assert not unheard


def test_a_system_without_a_thread_more_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(TierReadError, match=r"^reading files: can't start new thread; end other programs"):
        anyio.run(at_drive, divmod, 7, 2)


def test_an_error_holds_nothing_that_holds_it() -> None:
    def fail() -> None:
        raise Told

    async def main() -> None:
        try:
            await at_drive(fail)
        except Told as error:
            errors.append(weakref.ref(error))

    errors = list[weakref.ref[Told]]()
    gc.disable()
    try:
        anyio.run(main)
        assert errors[0]() is None
    finally:
        gc.enable()
