"""AnswerResponse: what a client sees while it waits, what happens when it leaves, and when the server does."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from edge_run.base.errors import ConfigError, KernelError
from edge_run.base.results import Piece, Speculation
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.server import answers
from edge_run.runtime.server.admission import Admission
from edge_run.runtime.server.answers import COMMENT, AnswerForm, AnswerResponse
from edge_run.runtime.server.apis.anthropic_messages import MessageForm
from edge_run.runtime.server.apis.llama_server import NativeCompletionForm
from edge_run.runtime.server.apis.openai_chat import ChatForm, ChatRequest
from edge_run.runtime.server.apis.openai_completions import CompletionForm, CompletionRequest
from edge_run.runtime.server.apis.responses_form import ResponseForm
from edge_run.runtime.server.catalogue.catalogue import Catalogue
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.generating import Job
from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.service import Service

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

pytestmark = pytest.mark.anyio


class FakeModel:
    """A model whose answers do what the test says."""

    def __init__(self) -> None:
        self.goes_on = anyio.Event()
        self.n_pieces: float = 3
        self.error: Exception | None = None
        self.ended = 0
        self.path, self.progress, self.has_chat_template = Path("model.gguf"), None, True
        self.numerics, self.forecast = "made up", lambda: None
        self.plan, self.embedding = SimpleNamespace(forecast=None, model_bytes=1), None
        self.context_tokens = self.trained_context_tokens = 100
        self.chat_template = ""
        self.generation: Any = SimpleNamespace(
            logprobs=(),
            finish_reason="length", text="", token_ids=(), prompt_tokens=1, cached_tokens=0, completion_tokens=3,
            decode_tokens_per_s=1.0, prefill_tokens_per_s=1.0, ttft_s=0.1, io=SimpleNamespace(bytes_read=0),
            speculation=Speculation(),
        )  # fmt: skip

    def metadata(self, key: str) -> str | None:
        return None

    def token_bytes(self, token: int) -> bytes:
        return b""

    async def generate(self, tokens: Any, **options: Any) -> AsyncGenerator[Piece, None]:
        try:
            await self.goes_on.wait()
            if self.error:
                raise self.error
            number = 0
            while number < self.n_pieces:
                yield Piece("a", (0,))
                number += 1
                await anyio.lowlevel.checkpoint()
            yield Piece("", (), self.generation)
        finally:
            self.ended += 1


class Client:
    """What ASGI sends to, and receives from. It reads as long as nobody says otherwise."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.came, self.leaves, self.reads = anyio.Event(), anyio.Event(), anyio.Event()
        self.reads.set()

    async def receive(self) -> Any:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message["body"]
            self.came.set()


@asynccontextmanager
async def answering(
    model: FakeModel, client: Client, is_stream: bool = True, form: AnswerForm | None = None
) -> AsyncIterator[Service]:
    """Answer a request in this block, and wait for the end of it. form: that of text completions where it is None."""
    catalogue = Catalogue.of(model, model)  # type: ignore[arg-type]
    service = Service(catalogue, Admission(0))

    async def make_job(served: ServedModel) -> Job:
        return Job([1], SamplingConfig())

    form = form or CompletionForm("model", CompletionRequest(prompt=""))
    response = AnswerResponse(service, catalogue.asked("any"), make_job, form, is_stream)
    async with anyio.create_task_group() as group:
        group.start_soon(response, {"type": "http"}, client.receive, client.send)
        with anyio.fail_after(30):
            yield service


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what it waits for sets no event
        await anyio.sleep(0.01)


async def test_headers_come_at_once_and_comments_while_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "QUICK_S", 0.01)
    monkeypatch.setattr(answers, "SILENCE_S", 0.01)
    model, client = FakeModel(), Client()
    async with answering(model, client):
        await until(lambda: client.body.count(COMMENT) >= 3)
        assert client.status == 200
        model.goes_on.set()
    assert client.body.endswith(b"data: [DONE]\n\n")
    assert client.body.count(b'"text":"a"') == 3


async def test_what_is_wrong_at_once_has_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "QUICK_S", math.inf)
    model, client = FakeModel(), Client()
    model.error = ConfigError("grammar: no")
    model.goes_on.set()
    with pytest.raises(ExceptionGroup) as caught:
        async with answering(model, client) as service:
            pass
    (refusal,) = caught.value.exceptions
    assert isinstance(refusal, Refusal)
    assert (refusal.status, client.status) == (400, 0)
    assert service.counts.finished == {"error": 1}


@pytest.mark.parametrize(
    ("form", "param"),
    [
        (ChatForm("model", ChatRequest(messages=[])), "messages"),
        (CompletionForm("model", CompletionRequest(prompt="")), "prompt"),
        (NativeCompletionForm("model", False, False), "prompt"),
        (ResponseForm("model", {}), "input"),
        (MessageForm("model"), "messages"),
    ],
)
async def test_a_prompt_that_is_too_long_is_called_what_its_api_calls_it(form: AnswerForm, param: str) -> None:
    model = FakeModel()
    model.context_tokens = 1
    with pytest.raises(ExceptionGroup) as caught:
        async with answering(model, Client(), is_stream=False, form=form):
            pass
    (refusal,) = caught.value.exceptions
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.param) == ("context_length_exceeded", param)


async def test_what_is_wrong_later_ends_the_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "QUICK_S", 0.01)
    model, client = FakeModel(), Client()
    model.error = KernelError("the drive is gone")
    async with answering(model, client):
        await client.came.wait()
        model.goes_on.set()
    assert client.status == 200
    assert b"the drive is gone" in client.body
    assert client.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_client_that_leaves_ends_its_answer(is_stream: bool, has_begun: bool) -> None:
    model, client = FakeModel(), Client()
    model.n_pieces = math.inf
    async with answering(model, client, is_stream) as service:
        if has_begun:
            model.goes_on.set()
        await until(lambda: service.admission.n_running >= has_begun)
        client.leaves.set()
    assert model.ended >= has_begun
    assert (service.admission.n_running, service.admission.n_waiting) == (0, 0)
    assert service.counts.finished == {"abort": 1}


async def test_a_client_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_FRAMES", 50)
    model, client = FakeModel(), Client()
    model.n_pieces = math.inf
    model.goes_on.set()
    client.reads = anyio.Event()
    async with answering(model, client) as service:
        pass
    assert model.ended == 1
    assert service.counts.finished == {"abort": 1}


async def test_when_the_server_ends_the_client_is_told() -> None:
    model, client = FakeModel(), Client()
    model.n_pieces = math.inf
    model.goes_on.set()
    async with answering(model, client) as service:
        await client.came.wait()
        service.admission.cancel()
    assert b"shutting_down" in client.body
    assert model.ended == 1


async def test_an_answer_that_is_cancelled_by_nobody_is_an_error() -> None:
    """A task group takes a task that ends as cancelled for one that it cancelled itself, and says nothing."""
    model, client = FakeModel(), Client()
    model.error = anyio.get_cancelled_exc_class()()  # type: ignore[assignment]
    model.goes_on.set()
    with pytest.raises(ExceptionGroup) as caught:
        async with answering(model, client):
            pass
    (refusal,) = caught.value.exceptions
    assert isinstance(refusal, Refusal)
    assert (refusal.status, client.status) == (500, 0)


async def test_what_was_asked_is_not_kept_while_it_is_answered() -> None:
    class Asked:
        async def job(self, served: ServedModel) -> Job:
            return Job([1], SamplingConfig())

    model, client, asked = FakeModel(), Client(), Asked()
    catalogue = Catalogue.of(model, model)  # type: ignore[arg-type]
    form = CompletionForm("model", CompletionRequest(prompt=""))
    service = Service(catalogue, Admission(0))
    response = AnswerResponse(service, catalogue.asked("any"), asked.job, form, False)
    kept = weakref.ref(asked)
    del asked
    async with anyio.create_task_group() as group:
        group.start_soon(response, {"type": "http"}, client.receive, client.send)
        await anyio.wait_all_tasks_blocked()
        assert kept() is None
        model.goes_on.set()
    assert client.status == 200


async def test_a_whole_answer_is_sent_with_its_length() -> None:
    model, client = FakeModel(), Client()
    model.goes_on.set()
    async with answering(model, client, is_stream=False) as service:
        pass
    assert client.status == 200
    assert b'"text":"aaa"' in client.body
    assert service.counts.finished == {"length": 1}
    assert service.counts.generated_tokens == 3


async def test_what_comes_when_the_client_has_just_left_is_for_nobody() -> None:
    model = FakeModel()
    model.goes_on.set()
    catalogue = Catalogue.of(model, model)  # type: ignore[arg-type]
    service = Service(catalogue, Admission(0))

    async def make_job(served: ServedModel) -> Job:
        return Job([1], SamplingConfig())

    form = CompletionForm("model", CompletionRequest(prompt=""))
    response = AnswerResponse(service, catalogue.asked("any"), make_job, form, True)
    sender, receiver = anyio.create_memory_object_stream[Any](10)
    receiver.close()
    with service.admission.place() as place:
        await response._compute("", place, sender, lambda: None)
    assert service.counts.finished == {"abort": 1}
