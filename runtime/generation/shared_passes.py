"""Answers of several tasks in shared passes: whichever of them waits for a piece computes the next pass for all."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator

import anyio
import anyio.lowlevel
import anyio.to_thread

from edge_run.base.errors import EdgeRunError
from edge_run.base.results import Piece
from edge_run.runtime.generation.batch import Batch, Event
from edge_run.runtime.generation.model import Model
from edge_run.runtime.generation.request import Request
from edge_run.runtime.processes.async_owner import run_in_thread


class SharedPasses:
    """The answers of one model to the tasks of one event loop. Nothing here is thread-safe."""

    def __init__(self, model: Model, thread: anyio.CapacityLimiter) -> None:
        """thread: of the one worker thread that uses `model`."""
        self._model, self._thread = model, thread
        self._batch: Batch | None = None
        self._inboxes: dict[int, deque[Event | EdgeRunError]] = {}
        self._is_computing = False
        self._came = anyio.Event()  # something for an inbox, or the turn to compute

    async def stream(self, request: Request) -> AsyncGenerator[Piece, None]:
        """Answer a request; iterate over the pieces. Closing it, or cancelling the task, ends the answer."""
        number = await self._submit(request)
        inbox = self._inboxes[number]
        is_over = False
        try:
            while not is_over:
                while not inbox:
                    await (self._came.wait() if self._is_computing else self._compute(number))
                found = inbox.popleft()
                if isinstance(found, EdgeRunError):
                    is_over = True
                    raise found
                is_over = found.is_last
                if found.error:
                    raise found.error
                assert found.piece is not None
                yield found.piece
        finally:
            del self._inboxes[number]
            if not is_over:
                await self._drop(number)

    async def _submit(self, request: Request) -> int:
        """Take a request on, between two passes."""

        def submit() -> int:
            self._batch = self._batch or self._model.open_batch()
            number = self._batch.submit(self._model.begin(request), request.turn)
            self._inboxes[number] = deque()
            return number

        number = -1
        with anyio.CancelScope(shield=True):
            number = await anyio.to_thread.run_sync(submit, limiter=self._thread)
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()
        except BaseException:
            del self._inboxes[number]
            await self._drop(number)
            raise
        return number

    async def _compute(self, number: int) -> None:
        """Compute a pass for all, and tell all of what came. Where the task is cancelled, end its request, if alone."""
        batch = self._batch
        assert batch is not None
        self._is_computing = True

        def advance() -> None:
            try:
                found: list[Event] = batch.advance()
            except EdgeRunError as error:
                batch.drop_all()
                for inbox in self._inboxes.values():
                    inbox.append(error)
            else:
                for event in found:
                    if event.request in self._inboxes:
                        self._inboxes[event.request].append(event)

        try:
            await run_in_thread(advance, self._thread, on_cancel=lambda: batch.cancel(number))
        finally:
            self._is_computing = False
            came, self._came = self._came, anyio.Event()
            came.set()

    async def _drop(self, number: int) -> None:
        """End a request that nobody waits for any more."""
        batch = self._batch
        assert batch is not None
        if self._is_computing:
            batch.cancel(number)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(batch.drop, number, limiter=self._thread)
