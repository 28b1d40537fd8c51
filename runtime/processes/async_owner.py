"""What models for asyncio and trio share: one worker thread, in which the model is opened, used and closed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from edge_run.base.closing import Closing
from edge_run.base.errors import ConfigError
from edge_run.runtime.processes.forks import OwnerProcess

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

_Model = TypeVar("_Model", bound=Closing)
_Result = TypeVar("_Result")
_Owner = TypeVar("_Owner", bound="AsyncOwner[Any]")


async def run_in_thread(
    function: Callable[[], _Result], thread: anyio.CapacityLimiter, on_cancel: Callable[[], object]
) -> _Result:
    """Return what `function` returns, called in a worker thread.

    Where the task is cancelled, `on_cancel` is called, to end the work, and the thread is waited for.
    """
    is_done = False

    async def watch() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            if not is_done:
                on_cancel()

    results: list[_Result] = []
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(watch, name="edge-run-watch")
            with anyio.CancelScope(shield=True):
                results.append(await anyio.to_thread.run_sync(function, limiter=thread))
            is_done = True
            group.cancel_scope.cancel()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    await anyio.lowlevel.checkpoint_if_cancelled()
    return results[0]


class AsyncOwner(Generic[_Model]):
    """The owner of a model that `async with` opens and closes; of the process that opened it, and of no child.

    open_model: opens it, in the worker thread.
    usage: how this class is used, for who uses it without `async with`.
    """

    def __init__(self, open_model: Callable[[], _Model], usage: str) -> None:
        self._open, self._usage = open_model, usage
        self._model: _Model | None = None
        self._thread = anyio.CapacityLimiter(1)
        self._owner_process = OwnerProcess()

    async def __aenter__(self: _Owner) -> _Owner:
        self._model = await anyio.to_thread.run_sync(self._open, limiter=self._thread)
        return self

    async def __aexit__(self, *_: object) -> None:
        model, self._model = self._opened, None
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(model.close, limiter=self._thread)

    @property
    def _opened(self) -> _Model:
        name = type(self).__name__
        if self._model is None:
            raise ConfigError(f"{name}: is not open; use it as `async with {self._usage} as model`")
        self._owner_process.check(f"this {name}")
        return self._model
