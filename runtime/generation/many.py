"""Many prompts, answered together: their answers as they come."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator

from edge_run.base.errors import Cancelled, EdgeRunError
from edge_run.base.results import Generation, Piece
from edge_run.runtime.generation.batch import Batch
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.request import Request
from edge_run.runtime.processes.forks import OwnerProcess


class ManyStream:
    """An iterator of what comes of many requests: the number of one, and a `Piece` of its answer or its error.

    Numbers count the prompts from 0. The last piece of each answer carries its `Generation`; a request that failed has
    an error instead. Not thread-safe. `close` ends all answers.
    """

    def __init__(self, owner: object, many: ManyAnswers, owner_process: OwnerProcess) -> None:
        self._owner, self._many, self._owner_process = owner, many, owner_process
        self._pieces = many.run()
        weakref.finalize(self, many.close)

    def __iter__(self) -> Iterator[tuple[int, Piece | EdgeRunError]]:
        return self

    def __next__(self) -> tuple[int, Piece | EdgeRunError]:
        self._owner_process.check("these answers")
        return next(self._pieces)

    def results(self) -> list[Generation | EdgeRunError]:
        """Run to the end; return what came of each prompt, in their order: its answer, or the error that ended it."""
        found: dict[int, Generation | EdgeRunError] = {}
        for number, piece in self:
            if isinstance(piece, EdgeRunError):
                found[number] = piece
            elif piece.generation:
                found[number] = piece.generation
        if len(found) < self._many.n_taken:
            raise Cancelled("the answers were ended before they finished")
        return [found[number] for number in range(self._many.n_taken)]

    def close(self) -> None:
        """End all answers here. Idempotent."""
        self._pieces.close()
        self._many.close()


class ManyAnswers:
    """Answers in the making: what a `ManyStream` iterates over, without a reference to it.

    n_taken: the prompts that were taken so far.
    """

    def __init__(
        self,
        batch: Batch,
        requests: Iterable[Request],
        begin: Callable[[Request], Continuation],
        max_parallel: int | None = None,
    ) -> None:
        """Prepare to answer `requests`, which are taken one by one, as there is room for them.

        begin: returns the beginning of an answer, or raises what is wrong with a request.
        """
        self._batch, self._requests, self._begin = batch, iter(requests), begin
        self._most = min(max_parallel or batch.most_parallel, batch.most_parallel)
        self.n_taken = 0
        self._numbers: dict[int, int] = {}  # of the batch's requests, those of ours

    def run(self) -> Generator[tuple[int, Piece | EdgeRunError], None, None]:
        """Compute the answers piece by piece, once."""
        while True:
            yield from self._take()
            if not self._numbers:
                return
            for event in self._batch.advance():
                number = self._numbers[event.request]
                if event.is_last:
                    del self._numbers[event.request]
                found = event.error or event.piece
                assert found is not None
                yield number, found

    def close(self) -> None:
        """End all answers. Idempotent."""
        self._batch.close()

    def _take(self) -> Iterator[tuple[int, EdgeRunError]]:
        """Take requests as long as there is room for more; yield the errors of those that cannot be."""
        while len(self._numbers) < self._most and (request := next(self._requests, None)) is not None:
            number, self.n_taken = self.n_taken, self.n_taken + 1
            try:
                answer = self._begin(request)
                submitted = self._batch.submit(answer, request.turn)
            except EdgeRunError as error:
                yield number, error
            else:
                self._numbers[submitted] = number
