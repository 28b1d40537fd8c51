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
from edge_run.runtime.server.answers import AnswerForm
from edge_run.runtime.server.apis.openai_chat import ChatForm, ChatRequest
from edge_run.runtime.server.apis.openai_completions import CompletionForm, CompletionRequest
from edge_run.runtime.server.formats.marked_output import MarkedOutput
from edge_run.runtime.server.generating import MOST_PROBABILITIES, Job, OutputParser, PlainOutput, generate

pytestmark = pytest.mark.anyio

HELLO: Any = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


class SayingModel:
    """A model that says these texts, a token each, how likely each was, and no more."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.asked = list[dict[str, Any]]()

    async def generate(self, tokens: object, **options: Any) -> AsyncGenerator[Piece, None]:
        self.asked.append(options)
        told = [((number, -float(number)), (7, -0.5)) for number in range(len(self.texts))]
        for number, text in enumerate(self.texts):
            yield Piece(text, (number,), None, told[number])
        generation: Any = SimpleNamespace(
            finish_reason="stop", logprobs=tuple(told), prompt_tokens=1, cached_tokens=0, completion_tokens=len(told),
            decode_tokens_per_s=1.0, prefill_tokens_per_s=1.0, io=SimpleNamespace(bytes_read=0),
            speculation=Speculation(),
        )  # fmt: skip
        yield Piece("", (), generation)


def chunks_of(data: bytes) -> list[dict[str, Any]]:
    texts = data.decode().replace("data: [DONE]", "").split("data: ")
    return [choice for text in texts if text.strip() for choice in json.loads(text)["choices"]]


@pytest.mark.parametrize(
    "form",
    [
        ChatForm("model", ChatRequest(messages=HELLO)),
        CompletionForm("model", CompletionRequest(prompt="")),
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
    form: AnswerForm, texts: tuple[str, ...], parser: Callable[[], OutputParser]
) -> None:
    served: Any = SimpleNamespace(fingerprint="b1", model=SimpleNamespace(token_bytes=lambda token: b"%d" % token))
    job, model, frames = Job([1], SamplingConfig(), parser=parser), SayingModel(*texts), list[bytes]()
    form.begin(served, job)
    outcomes = await generate(model, job, lambda *told: frames.append(form.piece(*told)), lambda n_tokens: None)  # type: ignore[arg-type]
    (whole,) = json.loads(form.whole(outcomes))["choices"]
    streamed = [one["logprobs"] for one in chunks_of(b"".join(frames)) if one["logprobs"]]
    for key in ("content", "token_logprobs"):
        assert [token for one in streamed for token in one.get(key, ())] == whole["logprobs"].get(key, [])


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
