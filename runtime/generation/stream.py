"""One answer as it comes: tokens chosen, turned into text, stopped where it ends, and measured."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate

from edge_run.base.closing import Closing
from edge_run.base.errors import Cancelled, EdgeRunError
from edge_run.base.results import Generation, Piece, Speculation
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.meter import Meter
from edge_run.runtime.generation.report import Course, report
from edge_run.runtime.processes.workplace import Workplace

logger = logging.getLogger(__name__)

GAVE_WAY = "another answer was begun on this model, which ended what was being answered"


class Stream(Closing):
    """An iterator of `Piece`s; the last one carries the `Generation`. Not thread-safe. `close` ends it early.

    Where another answer is begun on the model before the last piece, asking for the next one raises Cancelled. It keeps
    the model open that it comes from, so `Model(path).generate(...)` needs no name for the model.
    """

    def __init__(self, owner: object, answer: Answer, workplace: Workplace) -> None:
        self._owner, self._answer, self._workplace = owner, answer, workplace
        self._pieces = answer.run()
        weakref.finalize(self, answer.close).atexit = False  # a daemon may be computing it still

    def __repr__(self) -> str:
        reason = self.generation.finish_reason if self.generation else "not finished"
        return f"<{type(self).__name__}: {len(self.token_ids)} tokens, {reason}>"

    @property
    def generation(self) -> Generation | None:
        """The finished answer with its figures; None before the last piece."""
        return self._answer.generation

    @property
    def text(self) -> str:
        """What the answer has said so far: also where an error, Ctrl-C or `close` ended it."""
        return self._answer.text

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens of `text`."""
        return self._answer.token_ids

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        if self.generation is not None:
            self.close()
        if getgeneratorstate(self._pieces) == GEN_CLOSED:
            raise StopIteration
        if self._answer.gave_way:
            raise Cancelled(GAVE_WAY)
        return self._workplace.do(partial(next, self._pieces))

    def result(self) -> Generation:
        """Run to the end and return the finished answer with its figures.

        Raises what iterating raises, and Cancelled where the answer was ended before it finished.
        """
        for _ in self:
            pass
        if self.generation is None:
            raise Cancelled(GAVE_WAY if self._answer.gave_way else "the generation was ended before it finished")
        return self.generation

    def close(self) -> None:
        """End the answer here; what it has said stays in the conversation. Idempotent."""
        if getgeneratorstate(self._pieces) == GEN_RUNNING:
            raise self._workplace.refusal()
        self._pieces.close()
        self._answer.close()


class Answer:
    """An answer in the making: what a `Stream` iterates over, without a reference to it.

    gave_way: another answer was begun on the model before it was finished.
    """

    def __init__(
        self,
        engine: Engine,
        session: Session,
        meter: Meter,
        continuation: Continuation,
        deadline_s: float | None = None,
    ) -> None:
        """Prepare to compute `continuation`; nothing is computed before `run`.

        deadline_s: the seconds from now after which it ends as it is; None for never.
        """
        self._until_s = math.inf if deadline_s is None else time.monotonic() + deadline_s
        self._engine, self._session, self._meter, self._continuation = engine, session, meter, continuation
        self.generation: Generation | None = None
        self.is_closed = self.gave_way = False

    @property
    def speculation(self) -> Speculation:
        """The figures of speculation so far."""
        return self._session.speculation()

    @property
    def text(self) -> str:
        """The text so far."""
        return self._continuation.text

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens so far."""
        return tuple(self._continuation.tokens)

    def give_way(self) -> None:
        """End it, as another answer is begun on the model: who asks for its next piece is told."""
        if not self.is_closed and self.generation is None:
            self.gave_way = True
            self._continuation.close()

    def close(self) -> None:
        """End it, and free the sampler. Idempotent."""
        self.is_closed = True
        self._continuation.close()

    def run(self) -> Generator[Piece, None, None]:
        """Compute the answer piece by piece, once."""
        course, reason = Course(), "cancelled"
        self._meter.lap()
        with self._continuation as continuation:
            try:
                if self._engine.interrupt.is_set or self._is_late:
                    raise Cancelled("the generation was cancelled before it began")
                continuation.begin()
                told = self._engine.timeline.telling(continuation.note_read)
                with self._engine.interrupt.cancelling_at(self._until_s), told:
                    logits, course.cached_tokens = self._session.feed(continuation.prompt)
                course.prefilled(self._meter.lap())
                while not continuation.wants_none and (piece := continuation.choose(logits)):
                    course.ttft_s = course.ttft_s or course.prefill_s + self._meter.lap().wall_s
                    yield piece
                    if reason_to_stop := self._why_stop():
                        reason = reason_to_stop
                        break
                    self._meter.lap()
                    logits = self._session.step(piece.token_ids[0], continuation.n_left - 1)
                    course.decoded(self._meter.lap())
                else:
                    reason = "length" if continuation.wants_none else "stop"
            except Cancelled:
                reason = "deadline" if self._is_late else "cancelled"
        last = continuation.finish()
        if continuation.is_stopped:
            reason = "stop"
        speculation = self._session.speculation()
        course.shifted_tokens = self._session.shifted_tokens
        self.generation = report(self._engine, self._meter, continuation, course, reason, speculation)
        try:  # the answer is complete: of what was not kept nothing is lost but time
            self._session.finish()
        except Cancelled:
            pass
        except EdgeRunError as error:  # where it is more than that, the next answer meets it
            logger.warning("an answer is complete, but not what the next one goes on with: %s", error)
        yield replace(last, generation=self.generation)

    def _why_stop(self) -> str:
        why = self._continuation.why_stop()
        if why != "stop" and self._engine.interrupt.is_set:
            return "deadline" if self._is_late else "cancelled"  # which sets it too
        return why or ("deadline" if self._is_late else "context" if self._session.is_full else "")

    @property
    def _is_late(self) -> bool:
        return time.monotonic() >= self._until_s
