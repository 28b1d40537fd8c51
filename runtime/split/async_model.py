"""`AsyncSplitModel`: a SplitModel behind one thread, for asyncio and trio."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from edge_run.base.options import Unpack
from edge_run.base.split import SplitStats
from edge_run.runtime.processes.async_owner import AsyncOwner
from edge_run.runtime.split.model import Frame, SplitModel


class SplitOptions(TypedDict, total=False):
    """The keywords of `SplitModel`."""

    deadline_s: float
    mode: str
    use_filter: bool
    most_bytes: int | None
    threads: int | None


class AsyncSplitModel(AsyncOwner[SplitModel]):
    """A split model shared by tasks: `async with AsyncSplitModel(head, server) as model`.

    Frames are answered one after the other, first come first served. A frame that is being answered is finished even
    when its task is cancelled: that takes its deadline at most, or longer where the device itself takes longer for it.
    """

    def __init__(self, head: str | Path, server: str | None = None, **options: Unpack[SplitOptions]) -> None:
        """Take the arguments of `SplitModel`; the files are opened by `async with`."""
        super().__init__(lambda interrupt: SplitModel(head, server, **options), "AsyncSplitModel(head, server)")

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
        return await self._thread.run(partial(self._opened.run, image))
