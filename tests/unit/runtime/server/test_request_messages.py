"""Conversations in requests: whichever API they come by, a template is given turns, calls, results and thoughts."""

from __future__ import annotations

import json

import pytest

from chat_requests import HELLO, chat, refused
from edge_run.runtime.server.apis.anthropic_messages import CountRequest
from edge_run.runtime.server.apis.ollama import OllamaChatRequest
from edge_run.runtime.server.apis.openai_messages import template_messages
from edge_run.runtime.server.apis.responses import ResponsesRequest
from edge_run.runtime.server.bodies import convert, decode
from edge_run.runtime.server.refusals import Refusal


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
    parts = [{"type": "refusal", "refusal": "No."}, {"type": "text"}]
    assert refused(messages=[{"role": "user", "content": parts}]) == (400, "messages[0].content[1].text")


def test_what_is_wrong_with_the_result_of_a_tool_is_named() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "4", "id": None}]}
    body = {"messages": [{"role": "user", "content": [result]}]}
    (made,) = convert(body, CountRequest).task().messages
    assert made["content"] == "4"
    result["content"] = [{"text": "4"}]
    with pytest.raises(Refusal) as caught:
        convert(body, CountRequest).task()
    assert caught.value.param == "messages[0].content[0].content[0].type"


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "4"}
    asked = [
        HELLO,
        {"role": "user", "content": [{"type": "text", "text": "Are you there?"}]},
        {"role": "assistant", "content": "I look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "Now?"}]},
        {"role": "user", "content": [{**result, "tool_use_id": "b"}]},
        {"role": "assistant", "content": "It"},
        {"role": "assistant", "content": "is"},
    ]
    called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert decode(json.dumps({"messages": asked}).encode(), CountRequest).task().messages == [
        {"role": "user", "content": "Hello\n\nAre you there?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "a", "content": "4"},
        {"role": "tool", "tool_call_id": "b", "content": "4"},
        {"role": "user", "content": "Now?"},
        {"role": "assistant", "content": "It\n\nis"},
    ]
    asked = [HELLO, {"role": "assistant", "content": [call]}, {"role": "assistant", "content": "It"}]
    made = decode(json.dumps({"messages": asked}).encode(), CountRequest).task().messages
    assert [one.get("content") for one in made[2:]] == ["It"], "the beginning of an answer stays one after a call"


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


def test_all_thoughts_of_a_message_are_the_models() -> None:
    blocks = [
        {"type": "thinking", "thinking": "First.", "signature": ""},
        {"type": "tool_use", "id": "a", "name": "f", "input": {}},
        {"type": "thinking", "thinking": "Then.", "signature": ""},
    ]
    body = {"messages": [{"role": "assistant", "content": blocks}]}
    (made,) = decode(json.dumps(body).encode(), CountRequest).task().messages
    assert made["reasoning_content"] == "First.\n\nThen."
