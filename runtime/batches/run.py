"""Answers a file of requests, many at once, and writes each result as soon as it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from edge_run.base.protocols import Clock
from edge_run.runtime.batches.answering import BatchResult, Place, Places, refused
from edge_run.runtime.batches.input_file import BatchRequest, NumberedLine, read_requests
from edge_run.runtime.batches.results_file import ResultsFile
from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.tasks import task_group


@dataclass(slots=True)
class BatchProgress:
    """How far a batch is.

    all_requests: that are to be answered.
    kept: those whose results an earlier run wrote.
    done: those whose results this run wrote.
    failed: those of them that could not be answered.
    tokens: of the answers of this run.
    """

    all_requests: int
    kept: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    clock: Clock = time.monotonic
    began_s: float = field(default=0.0)

    def __post_init__(self) -> None:
        self.began_s = self.clock()

    @property
    def unfinished(self) -> int:
        """The requests that have no result."""
        return self.all_requests - self.kept - self.done

    @property
    def elapsed_s(self) -> float:
        """The seconds since this run began."""
        return max(1e-9, self.clock() - self.began_s)

    @property
    def tokens_per_s(self) -> float:
        """The tokens of answers, over the time."""
        return self.tokens / self.elapsed_s

    @property
    def remaining_s(self) -> float | None:
        """The seconds that are left at this pace; None before the first result."""
        return self.unfinished * self.elapsed_s / self.done if self.done else None


class BatchRun:
    """One run over a file of requests."""

    def __init__(
        self,
        source: Path,
        results: ResultsFile,
        progress: BatchProgress,
        on_progress: Callable[[], None],
        *,
        is_in_order: bool = False,
    ) -> None:
        """Prepare to answer the requests of `source` whose results are not there.

        on_progress: called after each result. is_in_order: results are written in the order of the requests, each when
        those before it are, and held in a file of their own until then.
        """
        self._source, self._results, self._progress, self._on_progress = source, results, progress, on_progress
        self._is_in_order = is_in_order
        self._held: dict[int, str | int] = {}  # the keys of results that wait for those before them
        self._next = 0
        self._turn = anyio.Lock()

    async def run(self, places: Places) -> None:
        """Answer all in `places`. Raises what a place raises."""
        async with task_group() as group:
            for number, line in enumerate(self._left()):
                if self._results.holds(line.key):
                    await self._recall(number, line.key)
                    continue
                if isinstance(line.asked, Refusal):
                    await self._finish(number, line.key, refused(line.asked))
                    continue
                place = await places.take(self._progress.unfinished)
                group.start_soon(self._answer, place, number, line.asked, name=f"edge-run-batch-{number}")

    def _left(self) -> Iterator[NumberedLine]:
        """Yield the lines whose results are not there."""
        for line in read_requests(self._source):
            if line.key in self._results.done:
                self._progress.kept += 1
            else:
                yield line

    async def _answer(self, place: Place, number: int, request: BatchRequest) -> None:
        await self._finish(number, request.custom_id, await place(request))

    async def _finish(self, number: int, key: str | int, result: BatchResult) -> None:
        """Write a result, or hold it while one before it is missing: also where another one ends the run meanwhile."""
        with anyio.CancelScope(shield=True):
            await self._keep(number, key, result)
        self._progress.done += 1
        self._progress.failed += result.status != 200
        self._progress.tokens += result.n_tokens
        self._on_progress()

    async def _keep(self, number: int, key: str | int, result: BatchResult) -> None:
        async with self._turn:
            is_next = self._is_next(number)
            keep = self._results.add if is_next else self._results.hold
            await anyio.to_thread.run_sync(keep, key, result.status, result.body)
            if is_next:
                self._next += 1
                await self._write_held()
            else:
                self._held[number] = key

    async def _recall(self, number: int, key: str | int) -> None:
        """Write a result that an earlier run held, or hold it on."""
        async with self._turn:
            self._held[number] = key
            if not self._is_in_order:
                self._next = number
            await self._write_held()
        self._progress.kept += 1

    def _is_next(self, number: int) -> bool:
        return not self._is_in_order or number == self._next

    async def _write_held(self) -> None:
        """Write the results that are held for one that is written now."""
        stop = self._next
        while stop in self._held:
            stop += 1
        numbers = range(self._next, stop)
        if numbers:  # they count as written once they are: a later result is not to come before them
            await anyio.to_thread.run_sync(self._results.add_held, [self._held[number] for number in numbers])
            for number in numbers:
                del self._held[number]
            self._next = stop
