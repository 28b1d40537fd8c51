"""AnswerResponse: what a client sees while it waits, what happens when it leaves, and when the server does."""

from __future__ import annotations

import json
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from answering_double import VOCABULARY, Client, FakeModel, answering
from catalogues import open_catalogue
from edge_run.base.errors import ConfigError, KernelError
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.server import answers
from edge_run.runtime.server.admission import Admission
from edge_run.runtime.server.answers import COMMENT, AnswerForm, AnswerResponse
from edge_run.runtime.server.apis.anthropic_messages import MessageForm
from edge_run.runtime.server.apis.llama_server import NativeCompletionForm
from edge_run.runtime.server.apis.ollama import OllamaForm
from edge_run.runtime.server.apis.openai_chat import ChatForm, ChatRequest
from edge_run.runtime.server.apis.openai_completions import CompletionForm, CompletionRequest
from edge_run.runtime.server.apis.responses_form import ResponseForm
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.generating import Job
from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.service import Service

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

pytestmark = pytest.mark.anyio


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what it waits for sets no event
        await anyio.sleep(0.01)


@pytest.mark.parametrize("is_slow", [False, True])
async def test_headers_come_soon_and_comments_while_nothing_else_does(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "QUICK_S", 0.01)
    monkeypatch.setattr(answers, "SILENCE_S", 0.01)
    model, client, is_prepared = FakeModel(), Client(), anyio.Event()
    async with answering(model, client, is_prepared=is_prepared if is_slow else None):
        await until(lambda: client.body.count(COMMENT) >= 3)
        assert client.status == 200
        is_prepared.set()
        model.goes_on.set()
    assert client.body.endswith(b"data: [DONE]\n\n")
    assert client.body.count(b'"text":"a"') == 3


@pytest.mark.parametrize(
    ("form", "first", "begins", "said"),
    [
        (MessageForm("model"), "ping", "message_start", b"event: ping\n"),
        (ResponseForm("model", {}), "response.created", "response.created", b"event: response.in_progress\n"),
        (OllamaForm("model", is_chat=False), None, None, b'"response":"","done":false'),
    ],
)
async def test_clients_that_count_events_or_lines_hear_some_while_nothing_else_comes(
    form: AnswerForm, first: str | None, begins: str | None, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the answer has begun, as while its model is opened."""
    monkeypatch.setattr(answers, "QUICK_S", 0.01)
    monkeypatch.setattr(answers, "SILENCE_S", 0.01)
    model, client, is_prepared = FakeModel(), Client(), anyio.Event()
    async with answering(model, client, form=form, is_prepared=is_prepared):
        await until(lambda: client.body.count(said) >= 2)
        n_said = client.body.count(said)
        is_prepared.set()
        await until(lambda: client.body.count(said) >= n_said + 4)
        model.goes_on.set()
    assert COMMENT not in client.body
    lines = [line.removeprefix("data: ") for line in client.body.decode().splitlines()]
    documents = [json.loads(line) for line in lines if line.startswith("{")]
    kinds = [one.get("type") for one in documents]
    assert kinds[0] == first
    assert begins is None or kinds.count(begins) == 1
    numbers = [one["sequence_number"] for one in documents if "sequence_number" in one]
    assert numbers == [*range(len(numbers))]


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
    "sampling", [SamplingConfig(grammar="root ::= no"), SamplingConfig(logit_bias={VOCABULARY: 1.0})]
)
async def test_a_grammar_or_a_bias_that_cannot_be_has_a_status_however_long_that_takes(
    sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "QUICK_S", 0.0)
    monkeypatch.setattr(answers, "SILENCE_S", math.inf)
    model, client = FakeModel(), Client()
    model.error = ConfigError("grammar: no")

    async def ask() -> None:
        async with answering(model, client, sampling=sampling):
            await anyio.wait_all_tasks_blocked()
            model.goes_on.set()

    with pytest.raises(ExceptionGroup) as caught:
        await ask()
    (refusal,) = caught.value.exceptions
    assert isinstance(refusal, Refusal)
    assert (refusal.status, client.status) == (400, 0)


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


async def test_clients_of_responses_look_in_the_stream_for_a_prompt_that_is_too_long() -> None:
    model, client = FakeModel(), Client()
    model.context_tokens = 1
    async with answering(model, client, form=ResponseForm("model", {})):
        pass
    assert client.status == 200
    assert b'"type":"response.failed"' in client.body
    assert b'"code":"context_length_exceeded"' in client.body


async def test_what_is_wrong_later_ends_the_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "QUICK_S", 0.01)
    monkeypatch.setattr(answers, "SILENCE_S", 0.01)
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
    catalogue = open_catalogue(model)
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
    catalogue = open_catalogue(model)
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


TELLING: list[Callable[[], AnswerForm]] = [
    lambda: ChatForm("model", ChatRequest(messages=[], return_progress=True)),
    lambda: CompletionForm("model", CompletionRequest(prompt="", return_progress=True)),
    lambda: NativeCompletionForm("model", False, True),
]


def progress_in(body: bytes) -> list[dict[str, Any]]:
    """Return what the events of a stream say of the prompt, up to the first piece; none may come later."""
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    n_before = next(n for n, event in enumerate(events) if '"a"' in json.dumps(event))
    assert not any("prompt_progress" in event for event in events[n_before:])
    return told


@pytest.mark.parametrize("make_form", TELLING)
async def test_how_far_the_prompt_is_comes_at_first_and_with_each_pass(make_form: Callable[[], AnswerForm]) -> None:
    model, client = FakeModel(), Client()
    model.read = (2, 6, 9)
    model.goes_on.set()
    async with answering(model, client, form=make_form(), n_tokens=9):
        pass
    told = progress_in(client.body)
    assert [(one["total"], one["cache"], one["processed"]) for one in told] == [(9, 2, 2), (9, 2, 6), (9, 2, 9)]
    assert [one["time_ms"] for one in told] == sorted(one["time_ms"] for one in told)


async def test_while_a_pass_takes_its_time_it_is_told_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PROGRESS_S", 0.01)
    model, client = FakeModel(), Client()
    model.read, model.is_computing = (2,), True
    async with answering(model, client, form=TELLING[2](), n_tokens=10):
        await until(lambda: client.body.count(b"prompt_progress") >= 3)
        assert COMMENT not in client.body
        model.goes_on.set()
    assert client.body.count(b'"total":10,"cache":2,"processed":2,') == client.body.count(b"prompt_progress")
    assert client.body.count(b'"share":0.25,') == client.body.count(b"prompt_progress")


async def test_who_has_read_the_prompt_hears_no_more_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PROGRESS_S", 0.01)
    model, client = FakeModel(), Client()
    model.read = (0, 1)
    async with answering(model, client, form=TELLING[0]()):
        await until(lambda: client.body.count(COMMENT) >= 3)
        model.goes_on.set()
    assert [one["processed"] for one in progress_in(client.body)] == [0, 1]


@pytest.mark.parametrize(
    ("form", "is_stream"),
    [
        *((make_form(), False) for make_form in TELLING),
        (ChatForm("model", ChatRequest(messages=[])), True),
        (CompletionForm("model", CompletionRequest(prompt="")), True),
        (NativeCompletionForm("model", False, False), True),
        (OllamaForm("model", is_chat=False), True),
    ],
)
async def test_who_does_not_want_to_know_is_not_told_how_far_the_prompt_is(form: AnswerForm, is_stream: bool) -> None:
    model, client = FakeModel(), Client()
    model.read = (0, 1)
    model.goes_on.set()
    async with answering(model, client, is_stream, form):
        pass
    assert not model.was_asked_to_tell
    assert client.body
    assert b"prompt_progress" not in client.body


async def test_what_is_read_for_a_client_that_has_left_is_for_nobody() -> None:
    model, client = FakeModel(), Client()
    model.read = (0,)
    async with answering(model, client, form=TELLING[0](), n_tokens=9):
        await client.came.wait()
        client.leaves.set()
    response = AnswerResponse(None, None, None, TELLING[0](), True)  # type: ignore[arg-type]
    sender, receiver = anyio.create_memory_object_stream[Any](10)
    with sender:
        receiver.close()
        response._note_read(sender, 0, 9, 4)
    response._note_read(sender, 0, 9, 9)
    assert not response._readings
