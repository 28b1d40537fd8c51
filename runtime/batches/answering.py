"""Answers requests of a batch with a model that is open in this process, many in each pass."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import anyio

from edge_run.base.errors import (
    BudgetError,
    Cancelled,
    ConfigError,
    ContextFull,
    EdgeRunError,
    KernelError,
    LogitsError,
    MeshError,
    NotSupported,
    TierReadError,
    lacks_room,
)
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.batches.input_file import CHAT, COMPLETIONS, BatchRequest
from edge_run.runtime.generation.async_model import AsyncModel
from edge_run.runtime.generation.model import Model
from edge_run.runtime.server.answers import AnswerForm
from edge_run.runtime.server.apis.openai_chat import ChatForm, ChatRequest, chat_job
from edge_run.runtime.server.apis.openai_completions import CompletionForm, CompletionRequest, completion_job
from edge_run.runtime.server.bodies import convert
from edge_run.runtime.server.catalogue.folder import model_name
from edge_run.runtime.server.catalogue.served_model import MOST_UNPREPARED, AnswerDefaults, Preparing, ServedModel
from edge_run.runtime.server.counts import Counts
from edge_run.runtime.server.generating import FinishedAnswer, Job, generate
from edge_run.runtime.server.refusals import Refusal, openai_error, refusal_of

WAITING = 4  # requests that are prepared while others are answered, so that a pass never lacks one


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What came of a request.

    status: of HTTP.
    body: the answer, or the error, as the server would give it.
    n_tokens: of the answer.
    """

    status: int
    body: bytes | Mapping[str, Any]
    n_tokens: int = 0


Place = Callable[[BatchRequest], Awaitable[BatchResult]]
"""Where one request is answered. It is used once, and free again when it returns.

It raises what others would meet too: errors of a drive, of memory, of a mesh, of the model's file, of llama.cpp.
All else is the request's result.
"""


class Places(Protocol):
    """Where requests are answered: here, or on other machines."""

    async def take(self, n_unfinished: int) -> Place:
        """Wait for a place for one of `n_unfinished` requests that have no answer yet, and return it."""
        ...


class PlacesHere:
    """The places of a model that is open in this process, `most` of them. Belongs to one event loop."""

    def __init__(self, served: ServedModel) -> None:
        self.most = served.model.most_parallel + WAITING
        self._served, self._free = served, anyio.Semaphore(self.most)
        self._preparing = anyio.Semaphore(MOST_UNPREPARED)  # more at once, and the server would refuse some
        self._n_generating, self._one_ended = 0, anyio.Event()

    @classmethod
    @asynccontextmanager
    async def of(
        cls, model: Model, sampling: SamplingConfig, most_tokens: int | None = None
    ) -> AsyncIterator[PlacesHere]:
        """Take `model` over, and close it at the end. sampling, most_tokens: for requests that say nothing."""
        async with AsyncModel.of(model) as answering:
            defaults = AnswerDefaults(sampling, most_tokens)
            yield cls(ServedModel(model_name(model.path), model, answering, defaults, Preparing(), Counts()))

    async def take(self, n_unfinished: int) -> Place:
        """Wait for a place, and return it."""
        await self._free.acquire()
        return self._answer

    async def _answer(self, request: BatchRequest) -> BatchResult:
        try:
            job, form = await self._prepared(request)
            answers = await self._generated(job)
        except Refusal as refusal:
            return refused(refusal)
        finally:
            self._free.release()
            ended, self._one_ended = self._one_ended, anyio.Event()
            ended.set()
        return BatchResult(200, form.whole(answers), sum(one.generation.completion_tokens for one in answers))

    async def _prepared(self, request: BatchRequest) -> tuple[Job, AnswerForm]:
        """Return what is to be generated, and its form. Raises Refusal for all that is wrong with this request."""
        try:
            async with self._preparing:
                job, form = await _job(self._served, request)
            job.check(self._served.model.context_tokens)
            form.begin(self._served, job)
        except (Cancelled, TierReadError, BudgetError, MeshError, KernelError):
            raise  # which others would meet too
        except EdgeRunError as error:  # such as the model's chat template, which takes too long for this one
            kind = ChatForm if request.url == CHAT else CompletionForm
            raise refusal_of(error, kind.prompt_param) from error
        return job, form

    async def _generated(self, job: Job) -> list[FinishedAnswer]:
        """Return the answers. Raises Refusal for what is wrong with this request; all else ends passes of others.

        Where the drive is full that keys and values go to, the request that began last gives its room to the others: it
        is answered anew once another one has ended. One that is alone took it from itself: its answers are generated
        anew one by one.
        """
        one_by_one = False
        while True:
            one_ended = self._one_ended
            self._n_generating += 1
            try:
                return await generate(
                    self._served.answering,
                    job,
                    lambda number, delta: None,
                    lambda n_tokens: None,
                    one_by_one=one_by_one,
                )
            except (ConfigError, ContextFull, NotSupported, LogitsError) as error:
                raise refusal_of(error) from error
            except TierReadError as error:
                has_others = min(self._n_generating, self._served.model.most_parallel) > 1 or one_ended.is_set()
                if not lacks_room(error) or not (has_others or (job.n_answers > 1 and not one_by_one)):
                    raise
            finally:
                self._n_generating -= 1
            if has_others:
                await one_ended.wait()
            else:
                one_by_one = True


def refused(refusal: Refusal) -> BatchResult:
    """Return the result of a request that cannot be answered."""
    return BatchResult(refusal.status, openai_error(refusal))


async def _job(served: ServedModel, request: BatchRequest) -> tuple[Job, AnswerForm]:
    """Return what is to be generated, and the form of the answer. Raises Refusal."""
    if request.method != "POST":
        raise Refusal(400, f"method {request.method[:20]!r}: must be POST", param="method")
    if request.url == CHAT:
        chat = convert(request.body, ChatRequest, "body")
        chat.check()
        return await chat_job(chat, chat.sampling(served.sampling), served), ChatForm(served.name, chat)
    if request.url == COMPLETIONS:
        completion = convert(request.body, CompletionRequest, "body")
        completion.check()
        sampling = completion.sampling(served.sampling)
        return await completion_job(completion, sampling, served), CompletionForm(served.name, completion)
    raise Refusal(400, f"url {request.url[:80]!r}: must be {CHAT} or {COMPLETIONS}", param="url")
