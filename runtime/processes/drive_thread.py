"""Work at a drive that may hang, for tasks of asyncio or trio: not even the end of the process waits for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel

from edge_run.base.errors import system_errors

_Result = TypeVar("_Result")


async def at_drive(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Return what `function` returns of `arguments`, called in a thread of its own.

    Where the task is cancelled the thread is left, and what comes of it is for nobody. It is a daemon: for the threads
    of anyio's pool, even those that were left, the process waits at its end. Raises what `function` raises, and
    TierReadError where the system has no thread for it.
    """
    token, is_over = anyio.lowlevel.current_token(), anyio.Event()
    outcomes = [Future[_Result]()]  # taken out at last, or an error would hold frames that hold it

    def work() -> None:
        try:
            outcomes[0].set_result(function(*arguments))
        except BaseException as error:
            outcomes[0].set_exception(error)
        with contextlib.suppress(RuntimeError):  # the event loop has ended: nobody waits
            anyio.from_thread.run_sync(is_over.set, token=token)

    with system_errors("reading files"):
        threading.Thread(target=work, name="edge-run-drive", daemon=True).start()
    await is_over.wait()
    return outcomes.pop().result()
