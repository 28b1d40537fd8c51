"""Answers a file of requests, many at once, and writes each result as soon as it is there."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from edge_run.base.config import SamplingConfig
from edge_run.base.errors import Cancelled, EdgeRunError, KernelError, MeshError, TierReadError
from edge_run.base.protocols import Clock
from edge_run.runtime.batches.input_file import BatchRequest, NumberedLine, read_requests
from edge_run.runtime.batches.results_file import ResultsFile
from edge_run.runtime.generation.async_model import AsyncModel
from edge_run.runtime.generation.model import Model
from edge_run.runtime.server.answers import AnswerForm
from edge_run.runtime.server.apis.openai_chat import ChatForm, ChatRequest, chat_job
from edge_run.runtime.server.apis.openai_completions import CompletionForm, CompletionRequest, completion_job
from edge_run.runtime.server.bodies import convert
from edge_run.runtime.server.catalogue.served_model import AnswerDefaults, Preparing, ServedModel
from edge_run.runtime.server.counts import Counts
from edge_run.runtime.server.generating import FinishedAnswer, generate
from edge_run.runtime.server.refusals import Refusal, openai_error, refusal_of

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WAITING = 4  # requests that are prepared while others are answered, so that a pass never lacks one


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
        left = self.all_requests - self.kept - self.done
        return left * self.elapsed_s / self.done if self.done else None


@dataclass(frozen=True, slots=True)
class _Result:
    custom_id: str
    status: int
    body: Any


class BatchRun:
    """One run over a file of requests."""

    def __init__(
        self,
        source: Path,
        results: ResultsFile,
        progress: BatchProgress,
        on_progress: Callable[[], None],
        sampling: SamplingConfig,
        most_tokens: int | None = None,
        *,
        is_in_order: bool = False,
    ) -> None:
        """Prepare to answer the requests of `source` whose results are not there.

        on_progress: called after each result. sampling, most_tokens: for requests that say nothing. is_in_order:
        results are written in the order of the requests, each when those before it are.
        """
        self._source, self._results, self._progress, self._on_progress = source, results, progress, on_progress
        self._sampling, self._most_tokens, self._is_in_order = sampling, most_tokens, is_in_order
        self._held: dict[int, _Result] = {}  # that wait for those before them
        self._next = 0
        self._turn = anyio.Lock()

    async def run(self, model: Model) -> None:
        """Answer all with `model`, which is closed at the end. Raises errors of the drive, of a mesh, of llama.cpp."""
        async with AsyncModel.of(model) as answering:
            defaults = AnswerDefaults(self._sampling, self._most_tokens)
            served = ServedModel(model.path.stem, model, answering, defaults, Preparing(), Counts())
            lines = enumerate(self._left())
            try:
                async with anyio.create_task_group() as group:
                    for number in range(model.most_parallel + WAITING):
                        group.start_soon(self._answer_all, served, lines, name=f"edge-run-batch-{number}")
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from failures.exceptions[0].__cause__

    def _left(self) -> Iterator[NumberedLine]:
        """Yield the lines whose results are not there."""
        for line in read_requests(self._source):
            if line.custom_id in self._results.done:
                self._progress.kept += 1
            else:
                yield line

    async def _answer_all(self, served: ServedModel, lines: Iterator[tuple[int, NumberedLine]]) -> None:
        for number, line in lines:
            status, body = await self._answer(served, line)
            result = _Result(line.custom_id, status, body)
            if not self._is_in_order:
                await self._write(result)
                continue
            self._held[number] = result
            while (held := self._held.pop(self._next, None)) is not None:
                self._next += 1
                await self._write(held)

    async def _write(self, result: _Result) -> None:
        async with self._turn:
            await anyio.to_thread.run_sync(self._results.add, result.custom_id, result.status, result.body)
        self._progress.done += 1
        self._progress.failed += result.status != 200
        self._on_progress()

    async def _answer(self, served: ServedModel, line: NumberedLine) -> tuple[int, Any]:
        try:
            if isinstance(line.asked, Refusal):
                raise line.asked
            return 200, await self._body(served, line.asked)
        except Refusal as error:
            refusal = error
        except (Cancelled, TierReadError, MeshError, KernelError):
            raise  # which others would meet too
        except EdgeRunError as error:
            refusal = refusal_of(error)
        return refusal.status, openai_error(refusal)

    async def _body(self, served: ServedModel, request: BatchRequest) -> bytes:
        if request.method != "POST":
            raise Refusal(400, f"method {request.method[:20]!r}: must be POST", param="method")
        form: AnswerForm
        if request.url == CHAT:
            chat = convert(request.body, ChatRequest, "body.")
            job, form = await chat_job(chat, served), ChatForm(served.name, chat)
        elif request.url == COMPLETIONS:
            completion = convert(request.body, CompletionRequest, "body.")
            job, form = await completion_job(completion, served), CompletionForm(served.name, completion)
        else:
            raise Refusal(400, f"url {request.url[:80]!r}: must be {CHAT} or {COMPLETIONS}", param="url")
        job.check(served.model.plan.context_tokens)
        form.begin(served, job)
        answers: list[FinishedAnswer] = await generate(
            served.answering, job, lambda number, delta: None, self._count_tokens
        )
        return form.whole(answers)

    def _count_tokens(self, n_tokens: int) -> None:
        self._progress.tokens += n_tokens
