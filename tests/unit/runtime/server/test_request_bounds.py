"""What a request may say has bounds: arguments of calls, metadata, schemas, texts among tokens."""

from __future__ import annotations

import json
import time
from typing import Any, cast

import msgspec
import pytest

from edge_run.base.errors import ContextFull
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.server.apis.llama_server import _prompt_tokens as prompt_tokens
from edge_run.runtime.server.apis.openai_chat import ChatRequest, chat_job
from edge_run.runtime.server.apis.responses import ResponsesRequest
from edge_run.runtime.server.bodies import decode
from edge_run.runtime.server.chat_task import count
from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.sampling_fields import schema_text


def calling(*arguments: str) -> list[dict[str, Any]]:
    calls = [{"function": {"name": "f", "arguments": one}} for one in arguments]
    return [{"role": "assistant", "tool_calls": calls}]


def test_arguments_of_all_calls_have_so_many_lists_and_objects_together() -> None:

    def body(**fields: Any) -> bytes:
        return json.dumps(fields).replace("\\u0001", "\\u005b").encode()  # which nobody counts in the body

    most = '{"a": \1' + ",".join(["\1]"] * 16_382) + "]}"
    (made,) = decode(body(messages=calling(*[most] * 4)), ChatRequest).task().messages
    assert len(made["tool_calls"]) == 4
    with pytest.raises(Refusal) as caught:
        decode(body(messages=calling(*[most] * 4, "{}")), ChatRequest).task()
    assert (caught.value.status, caught.value.param) == (400, "messages.tool_calls")
    items = [{"type": "function_call", "name": "f", "arguments": most}] * 5
    with pytest.raises(Refusal) as caught:
        decode(body(input=items), ResponsesRequest).task()
    assert (caught.value.status, caught.value.param) == (400, "input")


def test_brackets_in_texts_of_arguments_are_none() -> None:
    arguments = json.dumps({"a": "[" * 40_000})
    body = json.dumps({"messages": calling(arguments, arguments)}).encode()
    (made,) = decode(body, ChatRequest).task().messages
    assert [len(call["function"]["arguments"]["a"]) for call in made["tool_calls"]] == [40_000] * 2


def test_calls_in_a_row_are_one_message_however_many() -> None:
    calls = [{"type": "function_call", "name": "f", "call_id": f"{n}"} for n in range(10_000)]
    began_s = time.process_time()
    (made,) = decode(json.dumps({"input": calls}).encode(), ResponsesRequest).task().messages
    assert [call["id"] for call in made["tool_calls"]] == [call["call_id"] for call in calls]
    assert time.process_time() - began_s < 5


@pytest.mark.anyio
@pytest.mark.parametrize("make_job", [chat_job, lambda asked, _, served: count(served, asked.task)])
async def test_conversations_are_read_beside_the_event_loop(make_job: Any) -> None:
    """Arguments of calls may take a second."""

    class Served:
        async def prepare(self, function: Any, *arguments: Any) -> Any:
            raise LookupError(function.__name__)

    asked = decode(json.dumps({"messages": calling("{}")}).encode(), ChatRequest)
    with pytest.raises(LookupError, match="task"):
        await make_job(asked, SamplingConfig(), Served())


def test_a_response_gives_back_what_is_bounded() -> None:
    def asked(**fields: Any) -> ResponsesRequest:
        return decode(json.dumps({"input": "x", **fields}).encode(), ResponsesRequest)

    assert asked(metadata={"a" * 64: "b" * 512}).metadata
    for metadata in ({f"{n}": "" for n in range(17)}, {"a" * 65: ""}, {"a": "b" * 513}):
        with pytest.raises(Refusal) as caught:
            asked(metadata=metadata)
        assert (caught.value.param or "").startswith("metadata")
    known = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    form = asked(text={"format": {**known, "unknown": ["x"] * 1000}}).form
    assert json.loads(msgspec.json.encode(form)) == known
    text = asked(text={"format": {"type": "text", "schema": {"a": ["x"] * 1000}}}).form
    assert json.loads(msgspec.json.encode(text)) == {"type": "text"}
    assert asked(text={"format": {}}).form == text
    assert asked(text={"format": {**known, "description": "x" * 2000}}).form.description == "x" * 1024


@pytest.mark.parametrize("schema", [{"a": ["x"] * 40_000}, {str(n): {} for n in range(20_000)}, {"a": "x" * 70_000}])
def test_a_schema_that_is_too_long_is_not_written_out(schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", None)
    with pytest.raises(Refusal, match="65,536"):
        schema_text(schema, "schema")


class Tokenizer:
    """A model of which each letter is a token. asked: the texts that it turned into tokens."""

    context_tokens = 8

    def __init__(self) -> None:
        self.asked = list[str]()

    def tokenize(self, text: str, **_: bool) -> list[int]:
        self.asked.append(text)
        return list(map(ord, text))

    def check_tokens(self, what: str, tokens: list[int]) -> None:
        pass

    prompt_tokens = tokenize


def test_texts_among_tokens_have_a_bound() -> None:
    model = Tokenizer()
    assert prompt_tokens(cast("Any", model), [1, "ab", "", 2]) == [1, 97, 98, 2]
    model.asked.clear()
    with pytest.raises(ContextFull):
        prompt_tokens(cast("Any", model), [1, "a" * 9, "b", "c"])
    assert model.asked == ["a" * 9]
    with pytest.raises(Refusal, match="letters among tokens"):
        prompt_tokens(cast("Any", model), [1, "a" * (1 << 20), "b"])
    assert len(model.asked) == 1
