"""The one thread in which a model is opened, computes and is closed, for tasks of asyncio or trio."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Calls = SimpleQueue["Callable[[], None] | None"]
REST_S = 1.0  # without a call, after which the thread is at rest


class ModelThread:
    """A thread that calls functions for the tasks of an event loop, first come first served.

    It is always the same one, which a pool of threads does not promise: OpenMP keeps threads for each thread that ever
    computed, and where all of them are more than the cores, they sleep at each barrier instead of waiting for it, and
    passes take a tenth longer. For the same reason one at rest should keep none, which another model's may pay for.
    """

    def __init__(self, at_rest: Callable[[], object] = lambda: None) -> None:
        """at_rest: is called in the thread when it has had nothing to do for a while, once until the next call."""
        self._at_rest = at_rest
        self._calls: _Calls | None = None  # while there is a thread

    async def run(
        self,
        function: Callable[[], _Result],
        on_cancel: Callable[[], object] | None = None,
        *,
        is_owed: bool = False,
    ) -> _Result:
        """Return what `function` returns.

        Where the task is cancelled, a call that has not begun is none, unless it `is_owed`; one that has is waited for,
        and `on_cancel` may end it sooner.
        """
        if not is_owed:
            await anyio.lowlevel.checkpoint_if_cancelled()
        token, is_over = anyio.lowlevel.current_token(), anyio.Event()
        outcomes = [Future[_Result]()]  # taken out at last, or an error would hold frames that hold it

        def call() -> None:
            if not outcomes[0].set_running_or_notify_cancel():
                return
            try:
                outcomes[0].set_result(function())
            except BaseException as error:
                outcomes[0].set_exception(error)
            with contextlib.suppress(RuntimeError):  # the event loop has ended: nobody waits
                anyio.from_thread.run_sync(is_over.set, token=token)

        self._open().put(call)
        try:
            await is_over.wait()
        except anyio.get_cancelled_exc_class():
            if is_owed or not outcomes[0].cancel():
                if on_cancel is not None and not outcomes[0].done():
                    on_cancel()
                await _wait_all_the_same(is_over)
            raise
        return outcomes.pop().result()

    def close(self) -> None:
        """Let the thread end after the calls so far. A later call has another one."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None

    def _open(self) -> _Calls:
        if self._calls is None:
            self._calls = SimpleQueue()
            arguments = self._calls, self._at_rest
            threading.Thread(target=_call_all, args=arguments, name="edge-run-model", daemon=True).start()
            weakref.finalize(self, self._calls.put, None)
        return self._calls


async def _wait_all_the_same(event: anyio.Event) -> None:
    """Wait for `event`, however often the task is cancelled, by asyncio itself too."""
    while not event.is_set():
        with anyio.CancelScope(shield=True), contextlib.suppress(anyio.get_cancelled_exc_class()):
            await event.wait()


def _call_all(calls: _Calls, at_rest: Callable[[], object]) -> None:
    while (call := _next(calls, at_rest)) is not None:
        call()
        del call  # and with it what was called, until the next one comes


def _next(calls: _Calls, at_rest: Callable[[], object]) -> Callable[[], None] | None:
    with contextlib.suppress(Empty):
        return calls.get(timeout=REST_S)
    try:
        at_rest()
    except Exception:
        logger.exception("A thread that is at rest keeps what it has")
    return calls.get()
