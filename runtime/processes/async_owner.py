"""What models for asyncio and trio share: one thread, in which the model is opened, used and closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from edge_run.base.closing import Closing
from edge_run.base.errors import ConfigError
from edge_run.base.interrupt import Interrupt
from edge_run.runtime.processes.forks import OwnerProcess
from edge_run.runtime.processes.model_thread import ModelThread

_Model = TypeVar("_Model", bound=Closing)
_Owner = TypeVar("_Owner", bound="AsyncOwner[Any]")


class AsyncOwner(Generic[_Model]):
    """The owner of a model that `async with` opens and closes; of the process that opened it, and of no child.

    open_model: opens it, in the model's thread; the interrupt that it gets ends that.
    usage: how this class is used, for who uses it without `async with`.
    at_rest: as of `ModelThread`.
    """

    def __init__(
        self,
        open_model: Callable[[Interrupt], _Model],
        usage: str,
        interrupt: Interrupt | None = None,
        at_rest: Callable[[], object] = lambda: None,
    ) -> None:
        """interrupt: the one that `open_model` gets; None is a new one for each opening."""
        self._open, self._usage, self._interrupt = open_model, usage, interrupt
        self._is_entered = False
        self._model: _Model | None = None
        self._thread = ModelThread(at_rest)
        self._owner_process = OwnerProcess()

    async def __aenter__(self: _Owner) -> _Owner:
        interrupt = self._interrupt or Interrupt()

        def open_model() -> None:
            self._model = self._open(interrupt)

        if self._is_entered:
            raise ConfigError(
                f"{type(self).__name__}: is open already; use the one that is, in one `async with` around all"
            )
        self._is_entered = True
        try:
            await self._thread.run(open_model, on_cancel=interrupt.cancel)
        except BaseException:
            await self._close(self._model)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close(self._opened)

    async def _close(self, model: _Model | None) -> None:
        self._model = None
        try:
            if model is not None:
                await self._thread.run(model.close, is_owed=True)
        finally:
            self._thread.close()
            self._is_entered = False
            if self._interrupt is not None:
                self._interrupt.reset()  # it ended what was open here, and nothing that is opened later

    @property
    def _opened(self) -> _Model:
        name = type(self).__name__
        if self._model is None:
            raise ConfigError(f"{name}: is not open; use it as `async with {self._usage} as model`")
        self._owner_process.check(f"this {name}")
        return self._model
