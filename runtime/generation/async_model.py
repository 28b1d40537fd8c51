"""`AsyncModel`: a `Model` for asyncio or trio. One worker thread computes; tasks wait without blocking the loop."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from edge_run.base.profile import DeviceProfile
from edge_run.base.results import Generation, Piece, Plan, Progress, Stats
from edge_run.runtime.generation.model import Message, Model
from edge_run.runtime.generation.stream import Stream
from edge_run.runtime.processes.async_owner import AsyncOwner

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

_Result = TypeVar("_Result")


class AsyncModel(AsyncOwner[Model]):
    """A model shared by tasks. An async context manager: `async with AsyncModel(path) as model`.

    Generations run one after the other, first come first served. Cancelling a task, or leaving the loop over its
    pieces, ends its generation at the next node of the pass.
    """

    def __init__(self, path: str | Path, **options: Any) -> None:
        """Take the arguments of `Model`; the file is opened by `async with`."""
        super().__init__(partial(Model, path, **options), "AsyncModel(path)")
        # No lock: a generator that was left half way is closed by another task than the one that holds the turn.
        self._turn = anyio.Semaphore(1, max_value=1)

    @classmethod
    def of(cls, model: Model) -> AsyncModel:
        """Return an AsyncModel of a model that is open: `async with` takes it over, and closes it at the end."""
        made = cls(model.path)
        made._open = lambda: model
        return made

    @property
    def plan(self) -> Plan:
        """What goes where."""
        return self._opened.plan

    @property
    def progress(self) -> Progress | None:
        """How far the prompt or token at hand is; None between them."""
        return self._opened.progress

    @property
    def stats(self) -> Stats:
        """Figures since the model was opened."""
        return self._opened.stats

    def expect(self, profile: DeviceProfile | None = None) -> None:
        """Let `progress` say what remains as the device of `profile` would take; None is this device."""
        self._opened.expect(profile)

    def generate(self, prompt: str | Sequence[int], **options: Any) -> AsyncGenerator[Piece, None]:
        """Continue `prompt`; iterate over the pieces. Arguments and errors as for `Model.generate`."""
        return self._stream(partial(self._opened.generate, prompt, **options))

    def stream_chat(self, messages: Sequence[Message], **options: Any) -> AsyncGenerator[Piece, None]:
        """Answer a conversation; iterate over the pieces. Arguments and errors as for `Model.stream_chat`."""
        return self._stream(partial(self._opened.stream_chat, messages, **options))

    async def chat(self, messages: Sequence[Message], **options: Any) -> Generation:
        """Answer a conversation; return the finished answer."""
        generation = None
        async with aclosing(self.stream_chat(messages, **options)) as pieces:
            async for piece in pieces:
                generation = piece.generation
        assert generation is not None, "a stream ends with its generation"
        return generation

    async def __aexit__(self, *_: object) -> None:
        # Not in turn: a generator that was left half way may hold it for ever. The thread is free between passes.
        self._opened.cancel()
        await super().__aexit__()

    async def _stream(self, start: Callable[[], Stream]) -> AsyncGenerator[Piece, None]:
        model = self._opened
        async with self._turn:
            stream = await self._compute(model, start)
            try:
                while (piece := await self._compute(model, partial(next, stream, None))) is not None:
                    yield piece
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(stream.close, limiter=self._thread)

    async def _compute(self, model: Model, function: Callable[[], _Result]) -> _Result:
        """Run `function` in the worker thread; when this task is cancelled, end the pass and wait for the thread."""
        is_done = False

        async def watch() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                if not is_done:
                    model.cancel()

        results: list[_Result] = []
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(watch, name="edge-run-watch")
                with anyio.CancelScope(shield=True):
                    results.append(await anyio.to_thread.run_sync(function, limiter=self._thread))
                is_done = True
                group.cancel_scope.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures.exceptions[0].__cause__
        await anyio.lowlevel.checkpoint_if_cancelled()
        return results[0]
