"""Many prompts, answered together: their answers as they come."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from typing import Any

from edge_run.base.errors import Cancelled, ContextFull, EdgeRunError
from edge_run.base.results import Generation, Piece
from edge_run.runtime.generation.batched_answers import BatchedAnswers
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.request import Prompt, Request
from edge_run.runtime.processes.workplace import Workplace

_NONE: Any = object()  # where there are no more prompts


class ManyStream:
    """An iterator of what comes of many requests: the number of one, and a `Piece` of its answer or its error.

    Numbers count the prompts from 0. The last piece of each answer carries its `Generation`; a request that failed has
    an error instead. Not thread-safe. `close` ends all answers. Where another answer is begun on the model before the
    last piece, asking for the next one raises Cancelled. It keeps the model open.
    """

    def __init__(self, owner: object, many: ManyAnswers, workplace: Workplace) -> None:
        self._owner, self._many, self._workplace = owner, many, workplace
        self._pieces = many.run()

    def __iter__(self) -> Iterator[tuple[int, Piece | EdgeRunError]]:
        return self

    def __next__(self) -> tuple[int, Piece | EdgeRunError]:
        if (state := getgeneratorstate(self._pieces)) == GEN_RUNNING:
            raise self._workplace.refusal()
        if state != GEN_CLOSED:
            self._many.check()
        return next(self._pieces)

    def results(self) -> list[Generation | EdgeRunError]:
        """Run to the end; return what came of each prompt, in their order: its answer, or the error that ended it.

        After `Model.cancel` that is of the prompts that were taken by then.
        """
        found: dict[int, Generation | EdgeRunError] = {}
        for number, piece in self:
            if isinstance(piece, EdgeRunError):
                found[number] = piece
            elif piece.generation:
                found[number] = piece.generation
        if not self._many.is_complete or len(found) < self._many.n_taken:
            raise Cancelled("the answers were ended before they finished")
        return [found[number] for number in range(self._many.n_taken)]

    def close(self) -> None:
        """End all answers here. Idempotent."""
        if getgeneratorstate(self._pieces) == GEN_RUNNING:
            raise self._workplace.refusal()
        self._pieces.close()
        self._many.close()


class ManyAnswers:
    """Answers in the making: what a `ManyStream` iterates over, without a reference to it.

    n_taken: the prompts that were taken so far.
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
        self._answers, self._workplace, self._usual, self._begin = answers, workplace, usual, begin
        self._prompts = iter(prompts)
        self._most = min(max_parallel or answers.most_parallel, answers.most_parallel)
        self.n_taken, self.is_complete = 0, False
        self._numbers: dict[int, int] = {}  # of the batch's requests, those of ours

    def run(self) -> Generator[tuple[int, Piece | EdgeRunError], None, None]:
        """Compute the answers piece by piece, once."""
        takes_more = True
        while True:
            if takes_more:
                yield from self._take()
            if not self._numbers:
                self.is_complete = True
                return
            for event in self._workplace.do(self._answers.advance):
                number = self._numbers[event.request]
                if event.is_last:
                    del self._numbers[event.request]
                found = event.error or event.piece
                assert found is not None
                if event.piece and event.piece.generation and event.piece.generation.finish_reason == "cancelled":
                    takes_more = False  # `Model.cancel` ends all of them, those that have not begun too
                yield number, found

    def check(self) -> None:
        """Raise what ended all answers, if anything has."""
        self._workplace.check()
        self._answers.check()

    def close(self) -> None:
        """End all answers. Idempotent."""
        if self._workplace.is_here and not self._answers.is_closed:
            self._workplace.do(self._answers.close)

    def _take(self) -> Iterator[tuple[int, EdgeRunError]]:
        """Take prompts as long as there is room for more; yield the errors of those that cannot be."""
        while len(self._numbers) < self._most and (prompt := next(self._prompts, _NONE)) is not _NONE:
            submitted = self._workplace.do(partial(self._submit, prompt))
            number, self.n_taken = self.n_taken, self.n_taken + 1
            if isinstance(submitted, EdgeRunError):
                yield number, submitted
            else:
                self._numbers[submitted] = number

    def _submit(self, prompt: Any) -> int | EdgeRunError:
        """Take a prompt on; return its number in the batch, or what is wrong with it."""
        self._answers.check()
        try:
            request = prompt if isinstance(prompt, Request) else replace(self._usual, prompt=prompt)
            answer = self._begin(request)
        except EdgeRunError as error:
            return error
        try:
            return self._answers.submit(answer, request.turn)
        except ContextFull as error:
            answer.close()
            return error
