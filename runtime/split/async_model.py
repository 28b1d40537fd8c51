"""`AsyncSplitModel`: a SplitModel behind one worker thread, for asyncio and trio."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from edge_run.base.errors import ConfigError
from edge_run.base.split import SplitStats
from edge_run.runtime.processes.forks import OwnerProcess
from edge_run.runtime.split.model import Frame, SplitModel


class AsyncSplitModel:
    """A split model shared by tasks: `async with AsyncSplitModel(head, server) as model`.

    Frames are answered one after the other, first come first served. A frame that is being answered is finished even
    when its task is cancelled, which takes no longer than its deadline.
    """

    def __init__(self, head: str | Path, server: str | None = None, **options: Any) -> None:
        """Take the arguments of `SplitModel`; the files are opened by `async with`."""
        self._open = partial(SplitModel, head, server, **options)
        self._model: SplitModel | None = None
        self._thread = anyio.CapacityLimiter(1)
        self._owner_process = OwnerProcess()

    @property
    def stats(self) -> SplitStats:
        """Figures since the model was opened."""
        return self._opened.stats

    @property
    def problem(self) -> str:
        """Why there is no server; empty while there is one, or none was named."""
        return self._opened.problem

    async def run(self, image: str | Path | bytes | NDArray[np.uint8]) -> Frame:
        """Answer one frame. Arguments and errors as for `SplitModel.run`."""
        return await anyio.to_thread.run_sync(self._opened.run, image, limiter=self._thread)

    async def __aenter__(self) -> AsyncSplitModel:
        self._model = await anyio.to_thread.run_sync(self._open, limiter=self._thread)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        model, self._model = self._opened, None
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(model.close, limiter=self._thread)

    @property
    def _opened(self) -> SplitModel:
        if self._model is None:
            raise ConfigError(
                "AsyncSplitModel: is not open; use it as `async with AsyncSplitModel(head, server) as model`"
            )
        self._owner_process.check("this AsyncSplitModel")
        return self._model
