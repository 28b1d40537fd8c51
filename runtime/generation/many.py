"""Many prompts, answered together: their answers as they come."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from edge_run.base.closing import Closing
from edge_run.base.errors import BudgetError, Cancelled, ConfigError, ContextFull, EdgeRunError
from edge_run.base.results import Generation, Piece
from edge_run.runtime.generation.batched_answers import BatchedAnswers, Event
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.request import Prompt, Request, Turn
from edge_run.runtime.processes.workplace import Workplace

_NONE: Any = object()  # where there are no more prompts


class ManyStream(Closing):
    """An iterator of what comes of many requests: the number of one, and a `Piece` of its answer or its error.

    Numbers count the prompts from 0. The last piece of each answer carries its `Generation`; a request that failed has
    an error instead. Not thread-safe. `close` ends all answers. Where another answer is begun on the model before the
    last piece, asking for the next one raises Cancelled. It keeps the model open.
    """

    def __init__(self, owner: object, many: ManyAnswers, workplace: Workplace) -> None:
        self._owner, self._many, self._workplace = owner, many, workplace
        self._asking, self._asker = threading.Lock(), 0  # the thread that asked last
        self._ended: dict[int, Generation | EdgeRunError] = {}  # what came of prompts while `results` asked
        self._n_given = 0  # the ends of answers that who iterates was given
        weakref.finalize(self, many.answers.leave).atexit = False  # not `many`, whose prompts may know this stream

    def __iter__(self) -> Iterator[tuple[int, Piece | EdgeRunError]]:
        return self

    def __next__(self) -> tuple[int, Piece | EdgeRunError]:
        found = self._next()
        if found is None:
            raise StopIteration
        self._n_given += _end_of(found[1]) is not None
        return found

    def results(self) -> list[Generation | EdgeRunError]:
        """Run to the end; return what came of each prompt, in their order: its answer, or the error that ended it.

        After `Model.cancel` that is of the prompts that were taken by then. Where an error ended it, it may be called
        again, and goes on. Raises ConfigError where iterating gave the end of an answer before: that is not kept.
        """
        if self._n_given:
            raise ConfigError("results: iterating gave whole answers already, which are not kept; iterate to the end")
        while (found := self._next()) is not None:
            number, piece = found
            if (end := _end_of(piece)) is not None:
                self._ended[number] = end
        if not self._many.is_complete or len(self._ended) < self._many.n_taken:
            raise Cancelled("the answers were ended before they finished")
        return [self._ended[number] for number in range(self._many.n_taken)]

    def close(self) -> None:
        """End all answers here. Idempotent."""
        if self._asking.locked():
            raise self._workplace.refusal(self._asker)
        self._many.close()

    def _next(self) -> tuple[int, Piece | EdgeRunError] | None:
        """Return what comes next; None at the end."""
        if self._asking.locked():
            raise self._workplace.refusal(self._asker)
        with self._asking:
            self._asker = threading.get_ident()
            return self._many.next()


class ManyAnswers:
    """Answers in the making: what a `ManyStream` asks for the next piece, without a reference to it.

    answers: the requests in shared passes. n_taken: the prompts that were taken so far.
    is_complete: whether all answers have come that will.
    """

    def __init__(
        self,
        answers: BatchedAnswers,
        workplace: Workplace,
        prompts: Iterable[Prompt | Request],
        usual: Request,
        begin: Callable[[Request], Continuation],
        max_parallel: int | None = None,
    ) -> None:
        """Prepare to answer `prompts`, which are taken one by one, as there is room for them.

        usual: what is asked of a prompt that is no `Request`.
        begin: returns the beginning of an answer, or raises what is wrong with a request.
        """
        self.answers, self._workplace, self._usual, self._begin = answers, workplace, usual, begin
        self._prompts = iter(prompts)
        self._most = min(max_parallel or answers.most_parallel, answers.most_parallel)
        self._most_now = self._most  # fewer while the grammars that are open leave no room for the next one
        self._prompt: Any = _NONE  # that was taken, and is not submitted yet
        self._failure: BaseException | None = None  # of the prompts, as long as none came after it
        self._takes_more, self._is_closed = True, False
        self.n_taken, self.is_complete = 0, False
        self._numbers: dict[int, int] = {}  # of the batch's requests, those of ours
        self._found: deque[tuple[int, Piece | EdgeRunError]] = deque()

    def next(self) -> tuple[int, Piece | EdgeRunError] | None:
        """Return what comes next, which is computed where it has to be; None at the end.

        Raises what `Batch.advance` raises, or the prompts; it may be asked again then. Where no more prompts come after
        an error, as of a generator, that is raised once more when the others are answered: the end was not reached.
        """
        if self._is_closed or self.is_complete:
            return None
        self._workplace.check()
        self.answers.check()
        while not self._found:
            if self._takes_more:
                self._take()
            if self._found:
                break
            if not self._numbers:
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
                self.is_complete = True
                return None
            with self.answers.hearing_signals():  # what has come is noted
                for event in self._workplace.do(self.answers.advance):
                    self._note(event)
        return self._found.popleft()

    def close(self) -> None:
        """End all answers. Idempotent."""
        self._is_closed = True
        if self._workplace.is_here and not self.answers.is_closed:
            self._workplace.do(self.answers.close)

    def _note(self, event: Event) -> None:
        number = self._numbers[event.request]
        if event.is_last:
            del self._numbers[event.request]
            self._most_now = self._most
        found = event.error or event.piece
        assert found is not None
        if event.piece and event.piece.generation and event.piece.generation.finish_reason == "cancelled":
            self._takes_more = False  # `Model.cancel` ends all of them, those that have not begun too
        self._found.append((number, found))

    def _take(self) -> None:
        """Take prompts as long as there is room for more, up to one that cannot be."""
        while len(self._numbers) < self._most_now and not self._found:
            if self._prompt is _NONE:
                self._prompt = self._next_prompt()
            if self._prompt is _NONE:
                return
            found: Any = self._workplace.do(partial(self._begun, self._prompt))
            if isinstance(found, BudgetError) and self._numbers:
                self._most_now = len(self._numbers)  # the prompt has its turn when one of them has ended
                return
            with self.answers.hearing_signals():  # a prompt is taken and noted, or neither
                if not isinstance(found, EdgeRunError):
                    found = self._submit(*found)
                if isinstance(found, EdgeRunError):
                    self._found.append((self.n_taken, found))
                else:
                    self._numbers[found] = self.n_taken
                self.n_taken, self._prompt = self.n_taken + 1, _NONE

    def _next_prompt(self) -> Any:
        try:
            found = next(self._prompts, _NONE)
        except BaseException as error:  # one of Ctrl-C ends a generator too
            self._failure = error
            raise
        if found is not _NONE:
            self._failure = None
        return found

    def _begun(self, prompt: Any) -> tuple[Continuation, Turn] | EdgeRunError:
        """Return the beginning of an answer and whose turn it is, or what is wrong with the prompt."""
        self.answers.check()
        try:
            request = prompt if isinstance(prompt, Request) else replace(self._usual, prompt=prompt)
            return self._begin(request), request.turn
        except EdgeRunError as error:
            return error

    def _submit(self, answer: Continuation, turn: Turn) -> int | EdgeRunError:
        """Take an answer on; return its number in the batch, or why it has no room."""
        try:
            return self._workplace.do(partial(self.answers.submit, answer, turn))
        except EdgeRunError as error:
            answer.close()
            if isinstance(error, ContextFull):
                return error
            raise


def _end_of(piece: Piece | EdgeRunError) -> Generation | EdgeRunError | None:
    """Return what came of a prompt, where `piece` is the last there is of it."""
    return piece if isinstance(piece, EdgeRunError) else piece.generation
