"""Answers as they come: what each delta tells of tokens, and how many tokens there may be."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.results import Piece, Speculation
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.marked_output import MarkedOutput
from edge_run.runtime.formats.output import Delta, OutputParser, PlainOutput
from edge_run.runtime.server.answers import AnswerForm, event
from edge_run.runtime.server.apis.ollama import OllamaForm
from edge_run.runtime.server.apis.openai_chat import ChatForm, ChatRequest
from edge_run.runtime.server.apis.openai_completions import CompletionForm, CompletionRequest
from edge_run.runtime.server.apis.responses_form import ResponseForm
from edge_run.runtime.server.generating import (
    MOST_PROBABILITIES,
    FinishedAnswer,
    Job,
    generate,
)
from edge_run.runtime.server.refusals import Refusal

pytestmark = pytest.mark.anyio

HELLO: Any = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


class SayingModel:
    """A model that says these texts, a token each, how likely each was, and no more."""

    def __init__(self, *texts: str, finish: str = "stop") -> None:
        self.texts, self.finish = texts, finish
        self.asked = list[dict[str, Any]]()

    async def generate(self, tokens: object, **options: Any) -> AsyncGenerator[Piece, None]:
        self.asked.append(options)
        told = [((number, -float(number)), (7, -0.5)) for number in range(len(self.texts))]
        for number, text in enumerate(self.texts):
            yield Piece(text, (number,), None, told[number])
        generation: Any = SimpleNamespace(
            finish_reason=self.finish, logprobs=tuple(told), prompt_tokens=1, cached_tokens=0,
            completion_tokens=len(told), decode_tokens_per_s=1.0, prefill_tokens_per_s=1.0,
            io=SimpleNamespace(bytes_read=0), speculation=Speculation(),
        )  # fmt: skip
        yield Piece("", (), generation)


SERVED: Any = SimpleNamespace(fingerprint="b1", model=SimpleNamespace(token_bytes=lambda token: b"%d" % token))


async def streamed(
    form: AnswerForm, model: SayingModel, parser: Callable[[], OutputParser]
) -> tuple[bytes, list[FinishedAnswer]]:
    """Return what a form writes of a model's answer, up to its end, and the answer."""
    job, frames = Job([1], SamplingConfig(), parser=parser), list[bytes]()
    form.begin(SERVED, job)
    outcomes = await generate(model, job, lambda *told: frames.append(form.piece(*told)), lambda n_tokens: None)  # type: ignore[arg-type]
    return b"".join(frames), outcomes


def chunks_of(data: bytes) -> list[dict[str, Any]]:
    texts = data.decode().replace("data: [DONE]", "").split("data: ")
    return [choice for text in texts if text.strip() for choice in json.loads(text)["choices"]]


@pytest.mark.parametrize(
    "make_form",
    [
        lambda: ChatForm("model", ChatRequest(messages=HELLO)),
        lambda: CompletionForm("model", CompletionRequest(prompt="")),
    ],
)
@pytest.mark.parametrize(
    ("texts", "parser"),
    [
        (("a", "", "b", "", ""), PlainOutput),  # as those of a stop string, which come to nothing
        (("a", CALL, " ", "\n"), lambda: MarkedOutput(tools={"f": {}})),
    ],
)
async def test_a_stream_says_of_all_tokens_how_likely_they_were(
    make_form: Callable[[], AnswerForm], texts: tuple[str, ...], parser: Callable[[], OutputParser]
) -> None:
    form = make_form()
    data, outcomes = await streamed(form, SayingModel(*texts), parser)
    (whole,) = json.loads(form.whole(outcomes))["choices"]
    told = [one["logprobs"] for one in chunks_of(data) if one["logprobs"]]
    for key in ("content", "token_logprobs", "text_offset"):
        assert [token for one in told for token in one.get(key, ())] == whole["logprobs"].get(key, [])


async def test_tokens_of_thoughts_are_counted() -> None:
    model = SayingModel("<think>", "Hm", ", so", "</think>", "Yes")
    chat, response = ChatForm("model", ChatRequest(messages=HELLO)), ResponseForm("model", {})
    _, outcomes = await streamed(chat, model, MarkedOutput)
    assert outcomes[0].reasoning == "Hm, so"
    assert json.loads(chat.whole(outcomes))["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    usage = json.loads(response.whole(outcomes))["usage"]
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (5, {"reasoning_tokens": 3})


@pytest.mark.parametrize(
    ("texts", "items"),
    [
        (("<think>", "Hm", "</think>", "Yes"), [("reasoning", "completed"), ("message", "incomplete")]),
        (("<think>", "Hm"), [("reasoning", "incomplete")]),
    ],
)
async def test_a_response_says_which_item_was_cut(texts: tuple[str, ...], items: list[tuple[str, str]]) -> None:
    form = ResponseForm("model", {})
    data, outcomes = await streamed(form, SayingModel(*texts, finish="length"), MarkedOutput)
    lines = (data + form.end(outcomes)).decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    last, whole = events[-1]["response"], json.loads(form.whole(outcomes))
    for output in (done, last["output"], [item for item in whole["output"] if item["content"][0]["text"]]):
        assert [(item["type"], item["status"]) for item in output] == items
    assert (last["status"], whole["status"]) == ("incomplete", "incomplete")


def test_what_fills_silence_in_a_response_is_short() -> None:
    told = {"instructions": "i" * 9000, "tools": ["t" * 9000], "text": {"format": "f" * 9000}, "metadata": {}}
    form = ResponseForm("model", told)
    unasked: Any = None
    form.begin(unasked, unasked)
    silence = form.silence()
    assert len(silence) < 1000
    said = json.loads(silence.decode().split("data: ")[1])
    assert (said["type"], said["response"]["instructions"], said["response"]["tools"]) == (
        "response.in_progress",
        None,
        [],
    )


async def test_a_call_says_in_which_namespace_its_function_is() -> None:
    form = ResponseForm("model", {})
    form.namespaced = {"mcp__files__f": ("mcp__files", "f")}
    texts = [CALL, CALL.replace('"f"', '"mcp__files__f"')]
    tools: dict[str, Any] = {"f": {}, "mcp__files__f": {}}
    data, outcomes = await streamed(form, SayingModel(*texts), lambda: MarkedOutput(tools=tools))
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    for items in (done, json.loads(form.whole(outcomes))["output"]):
        assert [(item["name"], item.get("namespace")) for item in items] == [("f", None), ("f", "mcp__files")]


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "invalid_prompt"), (429, "rate_limit_exceeded"), (500, "server_error"), (503, "server_error")],
)
def test_a_response_that_failed_has_a_code_that_clients_of_openai_know(status: int, code: str) -> None:
    data = ResponseForm("model", {}).failed(Refusal(status, "no", code="ours")).decode()
    begun, goes_on, failed = (json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: "))
    assert (begun["type"], goes_on["type"]) == ("response.created", "response.in_progress")  # or SDKs refuse the rest
    assert failed["response"]["error"] == {"code": code, "message": "no"}
    long = ResponseForm("model", {}).failed(Refusal(status, "no", code="context_length_exceeded")).decode()
    assert '"code":"context_length_exceeded"' in long


def test_a_line_is_one_to_clients_that_know_more_ends_of_lines() -> None:
    text = "a\x85b\u2028c\u2029d\né"
    (line,) = OllamaForm("model", is_chat=True).piece(0, Delta(text)).decode().splitlines()
    assert json.loads(line)["message"]["content"] == text
    line, blank = event({"text": text}).decode().splitlines()
    assert (json.loads(line.removeprefix("data: ")), blank) == ({"text": text}, "")


@pytest.mark.parametrize(("key", "n_shares"), [("", 2), ("key", 1)])
async def test_answers_of_a_request_have_one_share_and_requests_without_a_key_one_each(key: str, n_shares: int) -> None:
    model: Any = SayingModel("a")
    for _ in range(2):
        job = Job([1], SamplingConfig(), key=key, salt="salt", others=[[2], [3]])
        await generate(model, job, lambda number, delta: None, lambda n_tokens: None)
    shares = [asked["key"] for asked in model.asked]
    assert len(set(shares[:3])) == len(set(shares[3:])) == 1
    assert len(set(shares)) == n_shares
    assert {asked["salt"] for asked in model.asked} == {f"{key}salt"}  # beginnings are shared as ever


def test_probabilities_of_many_tokens_are_bounded() -> None:
    plain = Job([1], SamplingConfig(), 30_000)
    assert (plain.most_tokens, replace(plain, max_tokens=None).most_tokens) == (30_000, None)
    told = Job([1], SamplingConfig(top_logprobs=100), 30_000, choices=2, others=[[2]])
    assert told.most_tokens == MOST_PROBABILITIES // (101 * 4)
    assert replace(told, max_tokens=None).most_tokens == told.most_tokens
    assert replace(told, max_tokens=7).most_tokens == 7
