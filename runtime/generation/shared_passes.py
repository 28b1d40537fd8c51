"""Answers of several tasks in shared passes: whichever of them waits for a piece computes the next pass for all."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import anyio
import anyio.to_thread

from edge_run.base.errors import BudgetError, Cancelled, EdgeRunError
from edge_run.base.results import Piece
from edge_run.runtime.generation.batch import Batch
from edge_run.runtime.generation.batched_answers import Event
from edge_run.runtime.generation.model import Model
from edge_run.runtime.generation.request import Request
from edge_run.runtime.grammars.grammar import grammar_text
from edge_run.runtime.grammars.room import RoomedGrammar
from edge_run.runtime.processes.fair_room import FairRoom
from edge_run.runtime.processes.model_thread import ModelThread
from edge_run.runtime.scheduling.shares import AGING_S

GRAMMARS_AHEAD = 2  # that are open for answers which are next
GRAMMAR_PAUSE_S = 0.1  # until it is looked again whether there is room for one more


class _Inbox:
    """What came for one request.

    is_waiting: its task waits for that, or for its turn to compute. batch, number: where the request was taken on.
    """

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.number = 0
        self.items: deque[Event | EdgeRunError] = deque()
        self.is_waiting = False
        self._woken = anyio.Event()

    def wake(self) -> None:
        """Have the task look."""
        self.is_waiting = False
        self._woken.set()

    async def wait(self) -> None:
        """Wait to be woken."""
        self.is_waiting, self._woken = True, anyio.Event()
        await self._woken.wait()


class SharedPasses:
    """The answers of one model to the tasks of one event loop.

    The event loop has the tasks; the model's thread has the batch, and the inboxes of its requests, which passes fill.

    After a pass those tasks are woken that it brought something, and one that computes the next: of a thousand that
    wait, each would take its time of the event loop in every pass.
    """

    def __init__(self, model: Model, thread: ModelThread) -> None:
        """thread: the one that uses `model`."""
        self._model, self._thread = model, thread
        self._tasks: dict[_Inbox, None] = {}  # in the order in which they came
        self._is_computing = False
        self._batch: Batch | None = None
        self._opening: anyio.CapacityLimiter | None = None  # of grammars: one at a time, and who waits can be cancelled
        self._grammars: FairRoom | None = None  # in which so many are open at a time
        self._inboxes: dict[int, _Inbox] = {}  # of the requests that have not ended

    def stream(self, request: Request) -> AsyncGenerator[Piece, None]:
        """Answer a request; iterate over the pieces. Closing it, or cancelling the task, ends the answer."""
        return self._roomed(request) if _has_grammar(request) else self._stream(request)

    async def _roomed(self, request: Request) -> AsyncGenerator[Piece, None]:
        """Answer a request with a grammar, once one more may be open: those of all that wait would fill the memory."""
        self._grammars = self._grammars or FairRoom(self._model.most_parallel + GRAMMARS_AHEAD, AGING_S)
        turn, began_s = request.turn, time.monotonic()
        async with self._grammars.held(turn.key, priority=turn.priority, patience_s=turn.deadline_s) as is_held:
            request = request.after(time.monotonic() - began_s if is_held else math.inf)
            async with aclosing(self._stream(request)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _stream(self, request: Request) -> AsyncGenerator[Piece, None]:
        inbox = _Inbox()
        await self._submit(request, inbox)
        self._tasks[inbox] = None
        is_over = False
        try:
            while not is_over:
                while not inbox.items:
                    await (inbox.wait() if self._is_computing else self._compute(inbox))
                found = inbox.items.popleft()
                if isinstance(found, EdgeRunError):
                    is_over = True
                    raise found
                is_over = found.is_last
                if found.error:
                    raise found.error
                assert found.piece is not None
                yield found.piece
        finally:
            del self._tasks[inbox]
            self._hand_over()
            if not is_over:
                await self._drop(inbox)

    async def _submit(self, request: Request, inbox: _Inbox) -> None:
        """Take a request on, between two passes. Its grammar is opened before, beside the passes of others."""
        grammars, is_gone, asked_s = list[RoomedGrammar](), threading.Event(), time.monotonic()
        # Once, however often it is tried: of a call that must be made this writes the schema.
        sampling = functools.cache(functools.partial(self._model.sampling_of, request))

        def open_grammar() -> None:
            if grammar := self._model.open_grammar(sampling()):
                grammars.append(grammar)
                if is_gone.is_set():  # asyncio cancels a task without waiting for the thread
                    grammar.close()

        def submit() -> None:
            batch = self._batch
            if batch is None or batch.is_closed:  # by another answer that its owner began on the model
                self._end_all(Cancelled("the answer was ended before it was finished"))
                batch = self._batch = self._model.open_batch()
            left = request.after(time.monotonic() - asked_s)
            inbox.number = batch.submit(self._model.begin(left, *grammars), left.turn)
            inbox.batch, self._inboxes[inbox.number] = batch, inbox

        try:
            if _has_grammar(request):
                await self._open(open_grammar, request.turn.deadline_s)
            await self._thread.run(submit)
        except BaseException:
            is_gone.set()
            if inbox.batch is not None:
                await self._drop(inbox)
            for grammar in grammars if inbox.batch is None else ():
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(grammar.close)
            raise

    async def _open(self, open_grammar: Callable[[], None], deadline_s: float | None) -> None:
        """Open a grammar, once those that are open leave room for it. Raises what `GrammarRoom.open` does."""
        self._opening = self._opening or anyio.CapacityLimiter(1)
        end_s = math.inf if deadline_s is None else time.monotonic() + deadline_s
        while True:
            try:
                return await anyio.to_thread.run_sync(open_grammar, limiter=self._opening)
            except BudgetError:
                if time.monotonic() >= end_s:
                    return None  # its time is over: it ends without one
            await anyio.sleep(GRAMMAR_PAUSE_S)

    def _hand_over(self) -> None:
        """Where nobody computes, wake a task that can."""
        if not self._is_computing:
            waiting = (inbox for inbox in self._tasks if inbox.is_waiting)
            if (first := next(waiting, None)) is not None:
                first.wake()

    async def _compute(self, own: _Inbox) -> None:
        """Compute a pass for all, and tell all of what came. Where the task is cancelled, end its request, if alone."""
        batch = own.batch
        assert batch is not None
        self._is_computing = True
        try:
            await self._thread.run(self._advance, on_cancel=lambda: batch.cancel(own.number))
        finally:
            self._is_computing = False
            for inbox in self._tasks:
                if inbox.items and inbox.is_waiting:
                    inbox.wake()
            if own.items:
                self._hand_over()

    def _advance(self) -> None:
        """Compute a pass, and put what it brought into the inboxes: in the model's thread."""
        batch = self._batch
        assert batch is not None
        try:
            found: list[Event] = batch.advance()
        except EdgeRunError as error:
            self._end_all(error)
            batch.drop_all()
            return
        for event in found:
            self._inboxes[event.request].items.append(event)
            if event.is_last:
                del self._inboxes[event.request]
        if batch.is_idle:  # who is left lost its request when the model was closed, or asked for something else
            self._end_all(Cancelled("the answer was ended before it was finished"))

    def _end_all(self, error: EdgeRunError) -> None:
        for inbox in self._inboxes.values():
            inbox.items.append(error)
        self._inboxes.clear()

    async def _drop(self, inbox: _Inbox) -> None:
        """End a request that nobody waits for any more."""
        batch = inbox.batch
        assert batch is not None

        def drop() -> None:
            batch.drop(inbox.number)
            if self._inboxes.get(inbox.number) is inbox:
                del self._inboxes[inbox.number]

        if self._is_computing:
            batch.cancel(inbox.number)
        await self._thread.run(drop, is_owed=True)


def _has_grammar(request: Request) -> bool:
    """Return whether the answer follows a grammar, which takes longer to make."""
    return request.toolbox.is_forced or bool(grammar_text(request.sampling)[0])
