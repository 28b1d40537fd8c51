"""What models for asyncio and trio share: one worker thread, in which the model is opened, used and closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import anyio
import anyio.to_thread

from edge_run.base.closing import Closing
from edge_run.base.errors import ConfigError
from edge_run.runtime.processes.forks import OwnerProcess

_Model = TypeVar("_Model", bound=Closing)
_Owner = TypeVar("_Owner", bound="AsyncOwner[Any]")


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
