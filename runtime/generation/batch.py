"""`Batch`: many answers at once, for programs with a loop of their own."""

from __future__ import annotations

from functools import partial

from edge_run.base.closing import Closing
from edge_run.base.errors import EdgeRunError
from edge_run.base.results import Speculation
from edge_run.runtime.generation.batched_answers import BatchedAnswers, Event
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.request import Turn
from edge_run.runtime.processes.workplace import Workplace


class Batch(Closing):
    """The requests that share the passes of one model, which it keeps open. Only `cancel` is thread-safe.

    Where it has ended, `submit` and `advance` raise Cancelled if another answer was begun on the model, and ConfigError
    if the batch or its model was closed.
    """

    def __init__(self, owner: object, answers: BatchedAnswers, workplace: Workplace) -> None:
        """owner: the model. answers: what is computed, which knows no owner, so that the model can end it."""
        self._owner, self._answers, self._workplace = owner, answers, workplace

    @property
    def speculation(self) -> Speculation:
        """The figures of speculation of all requests so far."""
        return self._answers.speculation

    @property
    def is_idle(self) -> bool:
        """Whether no request is left, nor anything to be told of one."""
        return self._answers.is_idle

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more requests: it was closed, or another answer was begun on the model."""
        return self._answers.is_closed

    @property
    def n_running(self) -> int:
        """The requests that share the next pass, as far as it is decided."""
        return self._answers.n_running

    @property
    def n_waiting(self) -> int:
        """The requests that wait for a sequence, or for memory."""
        return self._answers.n_waiting

    @property
    def most_parallel(self) -> int:
        """The requests that can share a pass."""
        return self._answers.most_parallel

    def submit(self, answer: Continuation, turn: Turn) -> int:
        """Take a request on; return its number. The batch closes `answer`. Raises ContextFull for a prompt too long."""

        def work() -> int:
            if self.is_idle:
                self._workplace.forget_cancel()  # that found nothing to end
            return self._answers.submit(answer, turn)

        try:
            return self._workplace.do(work)
        except EdgeRunError:
            answer.close()
            raise

    def advance(self) -> list[Event]:
        """Compute one pass; return what it brought. Raises the errors of `Decoder.decode`; `advance` may go on then.

        Where requests were cancelled, or are over without a pass, their ends are returned first: a pass that fails
        would take them along. An interrupt that is not the cancelling of single requests ends all of them.
        """
        return self._workplace.do(self._answers.advance)

    def cancel(self, number: int) -> None:
        """End a request after the pass at hand, from any thread; where all are ended, end the pass too."""
        self._answers.cancel(number)

    def drop(self, number: int) -> None:
        """Forget a request; without effect where it has ended."""
        if not self.is_closed:
            self._workplace.do(partial(self._answers.drop, number))

    def drop_all(self) -> None:
        """Forget all requests."""
        if not self.is_closed:
            self._workplace.do(self._answers.drop_all)

    def close(self) -> None:
        """Forget all requests, and empty the sequences. Idempotent."""
        if self._workplace.is_here and not self.is_closed:
            self._workplace.do(self._answers.close)
