"""What requests say: fields of the right kind within bounds, the rest refused by name, unknown ones ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.server.apis.anthropic_messages import CountRequest
from edge_run.runtime.server.apis.keep_alive import rest_s
from edge_run.runtime.server.apis.ollama import OllamaChatRequest, OllamaGenerateRequest
from edge_run.runtime.server.apis.openai_chat import ChatRequest
from edge_run.runtime.server.apis.openai_completions import CompletionRequest
from edge_run.runtime.server.apis.openai_messages import template_messages
from edge_run.runtime.server.apis.responses import ResponsesRequest
from edge_run.runtime.server.bodies import convert, decode
from edge_run.runtime.server.refusals import Refusal, anthropic_error

HELLO = {"role": "user", "content": "Hello"}


def chat(**fields: Any) -> ChatRequest:
    request = decode(json.dumps({"messages": [HELLO], **fields}).encode(), ChatRequest)
    request.check()
    request.variables()
    request.sampling(SamplingConfig(), request.response_format.text() if request.response_format else None)
    template_messages(request.messages)
    return request


def refused(**fields: Any) -> tuple[int, str | None]:
    with pytest.raises(Refusal) as caught:
        chat(**fields)
    return caught.value.status, caught.value.param


def test_sampling() -> None:
    defaults = SamplingConfig(temperature=0.3, top_k=7)
    assert chat().sampling(defaults) == defaults
    request = chat(temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=5, stop="END", max_tokens=3)
    assert request.sampling(defaults) == SamplingConfig(
        temperature=0, top_p=0.5, top_k=0, min_p=0.1, seed=5, stop=("END",)
    )
    assert chat(stop=["a", "", "b"]).sampling(defaults).stop == ("a", "b")
    assert chat(seed=-1).sampling(defaults).seed is None
    assert 0 <= (chat(seed=2**63 - 1).sampling(defaults).seed or -1) < 2**32 - 1
    assert chat(top_p=0).sampling(defaults).top_p > 0


def test_unknown_fields_are_ignored() -> None:
    assert chat(user="me", metadata={"a": {}}, store=False, service_tier="auto", made_up=[1]).messages[0].role == "user"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**40}, "top_k"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"repeat_last_n": -2147483648}, "repeat_last_n"),
        ({"stop": ["x" * 5000]}, "stop[0]"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [HELLO, {"role": "user", "content": 7}]}, "messages[1].content"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"enable_thinking": {"a": 1}}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"reasoning_effort": "x" * 1000}}, "chat_template_kwargs.reasoning_effort"),
        ({"logit_bias": [1]}, "logit_bias[0]"),
        ({"logit_bias": [[1, True]]}, "logit_bias"),
        ({"logit_bias": [[-1, 1]]}, "logit_bias[0][0]"),
        ({"logit_bias": [[1, 1]] * 1025}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields) == (400, param)


@pytest.mark.parametrize(
    ("value", "param"),
    [({}, "body.messages"), ([], "body"), ({"messages": [{"role": 3}]}, "body.messages[0].role")],
)
def test_a_part_of_a_document_is_named_by_its_place_there(value: Any, param: str) -> None:
    for where, named in (("body", param), ("", param.removeprefix("body").removeprefix("."))):
        with pytest.raises(Refusal) as caught:
            convert(value, ChatRequest, where)
        assert caught.value.param == (named or None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields) == (400, param)
    neutral = {name: type(value)() for name, value in fields.items() if name != "messages"}
    chat(**neutral)


def test_schemas_are_bounded() -> None:
    text = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["x" * 70_000]}}}
    assert refused(response_format=text) == (400, "response_format")
    request = chat(response_format={"type": "json_object"})
    assert request.response_format
    assert json.loads(request.response_format.text() or "") == {"type": "object"}
    assert chat(response_format={"type": "text"}).response_format.text() is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff",
        b'{"messages": NaN}',
        b'{"messages": [], "messages": []}',
        b'{"messages": "\\ud800"}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"a": ' + b"[" * 80 + b"]" * 80 + b"}",
        b'{"temperature": ' + b"9" * 100_000 + b"}",
        b'{"temperature": 1e999}',
    ],
    ids=range(12),
)
def test_bodies_that_are_not_right(body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        decode(body, ChatRequest)
    assert caught.value.status == 400
    assert len(caught.value.message) < 300


def test_content_in_parts_and_old_calls() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    assert template_messages(chat(messages=messages).messages) == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    call["function"]["arguments"] = "{"  # type: ignore[index]
    assert refused(messages=messages) == (400, "messages[1].tool_calls[0].function.arguments")


def test_null_is_what_a_client_in_go_writes_for_what_is_not_set() -> None:
    null = dict.fromkeys(("model", "stream", "format", "options", "think", "keep_alive"))
    asked = decode(json.dumps({**null, "messages": None, "tools": None}).encode(), OllamaChatRequest)
    assert (asked.is_stream, asked.said.num_predict, asked.messages) == (True, None, None)
    assert decode(json.dumps({**null, "prompt": None, "raw": None}).encode(), OllamaGenerateRequest).is_stream


def test_results_answer_ollamas_calls_in_their_order() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    asked = [
        HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "4", "tool_name": "add"},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "6"},
        {"role": "tool", "content": "nobody asked"},
    ]
    messages = decode(json.dumps({"messages": asked}).encode(), OllamaChatRequest).task().messages
    called = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert len(set(called)) == 3
    assert [message.get("tool_call_id") for message in messages if message["role"] == "tool"] == [*called, None]
    assert messages[1]["tool_calls"][0]["function"] == call["function"]
    assert all(isinstance(message["content"], str) for message in messages)


def test_a_conversation_of_thoughts_alone_cannot_be_answered() -> None:
    request = decode(json.dumps({"input": [{"type": "reasoning"}]}).encode(), ResponsesRequest)
    with pytest.raises(Refusal, match="input"):
        request.task()


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(None, None), (0, 0), (5, 5), (-1, None), ("1h30m", 5400), ("90", 90), ("-1s", None), ("250ms", 0.25)],
)
def test_how_long_a_model_stays(given: Any, seconds: float | None) -> None:
    assert rest_s(given) == seconds


def test_all_thoughts_of_a_message_are_the_models() -> None:
    blocks = [
        {"type": "thinking", "thinking": "First.", "signature": ""},
        {"type": "tool_use", "id": "a", "name": "f", "input": {}},
        {"type": "thinking", "thinking": "Then.", "signature": ""},
    ]
    body = {"messages": [{"role": "assistant", "content": blocks}]}
    (made,) = decode(json.dumps(body).encode(), CountRequest).task().messages
    assert made["reasoning_content"] == "First.\n\nThen."


def test_anthropics_clients_are_told_once_what_is_wrong() -> None:
    for message in ("max_tokens: is missing", "is missing"):
        said = anthropic_error(Refusal(400, message, param="max_tokens"))
        assert said["error"]["message"] == "max_tokens: is missing"


def test_completions_that_cannot_be() -> None:
    for fields, param in (({"echo": True}, "echo"), ({"best_of": 3}, "best_of"), ({"suffix": "x"}, "suffix")):
        with pytest.raises(Refusal) as caught:
            decode(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest).check()
        assert caught.value.param == param
