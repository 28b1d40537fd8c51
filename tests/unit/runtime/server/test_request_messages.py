"""Conversations in requests: whichever API they come by, a template is given turns, calls, results and thoughts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from chat_requests import HELLO, chat, refused
from edge_run.base.errors import ConfigError
from edge_run.runtime.server.apis.anthropic_messages import CountRequest
from edge_run.runtime.server.apis.ollama import OllamaChatRequest
from edge_run.runtime.server.apis.openai_chat import ChatRequest
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


def test_arguments_of_old_calls_may_be_an_object_and_what_an_assistant_said_null() -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": {"a": None}}}
    silent = {"role": "assistant", "content": None}
    made = template_messages(chat(messages=[HELLO, silent, {**silent, "tool_calls": [call]}]).messages)
    assert made[1] == {"role": "assistant", "content": ""}
    assert made[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": None}}
    assert refused(messages=[{"role": "user", "content": None}]) == (400, "messages[0].content")
    call["function"]["arguments"] = "[]"  # type: ignore[index]
    assert refused(messages=[{"role": "assistant", "tool_calls": [call]}]) == (
        400,
        "messages[0].tool_calls[0].function.arguments",
    )


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


def test_results_answer_the_calls_that_they_name_and_no_later_ones() -> None:
    one, other = ({"function": {"name": name, "arguments": {}}} for name in ("add", "paint"))
    asked = [
        HELLO,
        {"role": "assistant", "tool_calls": [{**one, "id": "a"}, {**one, "id": "b"}]},
        {"role": "tool", "content": "of b", "tool_call_id": "b"},
        {"role": "assistant", "tool_calls": [one, other]},
        {"role": "tool", "content": "painted", "tool_name": "paint"},
        {"role": "tool", "content": "4", "tool_name": "add"},
    ]
    messages = decode(json.dumps({"messages": asked}).encode(), OllamaChatRequest).task().messages
    added, painted = (call["id"] for call in messages[3]["tool_calls"])
    assert [one.get("tool_call_id") for one in messages if one["role"] == "tool"] == ["b", painted, added]


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


def test_identities_that_are_made_for_ollamas_calls_are_none_that_were_given() -> None:
    call = {"function": {"name": "add", "arguments": {}}}
    asked = [HELLO, {"role": "assistant", "tool_calls": [call, {**call, "id": "call_0"}]}]
    messages = decode(json.dumps({"messages": asked}).encode(), OllamaChatRequest).task().messages
    assert [made["id"] for made in messages[1]["tool_calls"]] == ["call_1", "call_0"]


def test_a_conversation_of_thoughts_alone_cannot_be_answered() -> None:
    request = decode(json.dumps({"input": [{"type": "reasoning"}]}).encode(), ResponsesRequest)
    with pytest.raises(Refusal, match="input"):
        request.task()


def test_thoughts_are_a_part_of_what_a_response_says_or_calls_after_them() -> None:
    def thought(text: str) -> dict[str, object]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    asked = [
        HELLO,
        thought("A call."),
        call,
        thought("And another."),
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "4"},
        thought("That is it."),
        {"role": "assistant", "content": "It is 4."},
        thought("Cut off."),
        HELLO,
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"role": "assistant", "content": "Yes."},
    ]
    made = convert({"input": asked}, ResponsesRequest).task().messages
    assert [(one["role"], one.get("reasoning_content")) for one in made] == [
        ("user", None),
        ("assistant", "A call.\n\nAnd another."),
        ("tool", None),
        ("assistant", "That is it."),
        ("user", None),
        ("assistant", None),
    ]
    assert [called["id"] for called in made[1]["tool_calls"]] == ["1", "2"]


def test_what_the_system_says_first_in_a_response_is_one_message() -> None:
    asked = [{"role": "developer", "content": "You may read."}, HELLO, {"role": "developer", "content": "No more."}]
    made = convert({"instructions": "Be kind.", "input": asked}, ResponsesRequest).task().messages
    assert [one["content"] for one in made if one["role"] == "system"] == ["Be kind.\n\nYou may read.", "No more."]


def test_what_codex_brings_beside_its_functions_is_left_out_and_namespaces_are_functions_too() -> None:
    run, read = ({"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("run", "read"))
    patch = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}}
    files = {"type": "namespace", "name": "mcp__files", "tools": [read, {"type": "custom", "name": "patch"}]}
    called = {"type": "function_call", "call_id": "1", "name": "read", "namespace": "mcp__files", "arguments": "{}"}
    tools = [{"type": "web_search"}, run, files, patch]
    asked = convert({"input": [HELLO, called], "tools": tools}, ResponsesRequest)
    task = asked.task()
    assert [tool.name for tool in task.toolbox.tools] == ["run", "mcp__files__read"]
    assert task.messages[1]["tool_calls"][0]["function"]["name"] == "mcp__files__read"
    assert [tool.name for tool in asked.known_tools] == ["run", "mcp__files"]
    assert [tool.type for tool in asked.known_tools[1].tools or ()] == ["function"], "custom is not given back"
    empty = {**files, "tools": []}
    assert not convert({"input": "a", "tools": [empty]}, ResponsesRequest).task().toolbox.tools
    own = {**files, "tools": [patch]}
    for alone, where in (
        ([patch], "tools[0].type"),
        ([empty, patch], "tools[1].type"),
        ([own], "tools[0].tools[0].type"),
    ):
        with pytest.raises(Refusal, match="'custom' is a tool of OpenAI's own") as refused:
            convert({"input": "a", "tools": alone}, ResponsesRequest).task()
        assert refused.value.param == where
    for broken in ([run, run], [{**files, "name": "f" * 128}]):
        with pytest.raises((Refusal, ConfigError), match="tools"):
            convert({"input": "a", "tools": broken}, ResponsesRequest).task().toolbox.check()


def test_the_function_that_must_be_called_may_be_one_of_a_namespace() -> None:
    def chosen(choice: Mapping[str, str], *tools: Any) -> str:
        given = {"type": "function", **choice}
        asked = convert({"input": "a", "tools": tools, "tool_choice": given}, ResponsesRequest)
        assert msgspec.to_builtins(asked.tool_choice) == given
        toolbox = asked.task().toolbox
        toolbox.check()
        (tool,) = toolbox.callable
        return tool.name

    read = {"type": "function", "name": "read"}
    files, web = ({"type": "namespace", "name": name, "tools": [read]} for name in ("files", "web"))
    assert chosen({"name": "read", "namespace": "web"}, read, files, web) == "web__read"
    assert chosen({"name": "read"}, read, files, web) == "read"
    assert chosen({"name": "read"}, files) == "files__read"
    for wrong in ({"name": "read"}, {"name": "read", "namespace": "disks"}):
        with pytest.raises(ConfigError, match="tool_choice: names none"):
            chosen(wrong, files, web)


def test_functions_that_the_model_would_call_alike_are_both_named() -> None:
    tools = [
        {"type": "namespace", "name": where, "tools": [{"type": "function", "name": name}]}
        for where, name in (("a", "b__c"), ("a__b", "c"))
    ]
    with pytest.raises(Refusal, match="'b__c' of 'a' and 'c' of 'a__b' would both be called a__b__c"):
        convert({"input": "a", "tools": tools}, ResponsesRequest).task()


def test_the_stamp_of_claude_code_does_not_make_beginnings_differ() -> None:
    def system_of(stamp: str, system: str = "x-anthropic-billing-header: cc_version=2.1.e51; cch={};You help.") -> str:
        blocks = [{"type": "text", "text": system.format(stamp)}, {"type": "text", "text": "Be kind; cch=a."}]
        body = {"messages": [HELLO], "system": blocks}
        said: str = convert(body, CountRequest).task().messages[0]["content"]
        assert convert({**body, "system": system.format(stamp)}, CountRequest).task().messages[0]["content"] in said
        return said

    assert system_of("a5145") == system_of("0ff1c")
    assert system_of("a5145").endswith("cch=00000;You help.\n\nBe kind; cch=a.")
    quoted = "Of x-anthropic-billing-header: cch={};"
    assert system_of("a5145", quoted) != system_of("0ff1c", quoted)


def test_all_thoughts_of_a_message_are_the_models() -> None:
    blocks = [
        {"type": "thinking", "thinking": "First.", "signature": ""},
        {"type": "tool_use", "id": "a", "name": "f", "input": {}},
        {"type": "thinking", "thinking": "Then.", "signature": ""},
    ]
    body = {"messages": [{"role": "assistant", "content": blocks}]}
    (made,) = decode(json.dumps(body).encode(), CountRequest).task().messages
    assert made["reasoning_content"] == "First.\n\nThen."


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
SEEN = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "4"}, PICTURE]}
PAGES = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}


@pytest.mark.parametrize(
    ("kind", "body", "told"),
    [
        (
            CountRequest,
            {"messages": [{"role": "user", "content": [SEEN]}, {"role": "user", "content": [PAGES]}]},
            [
                "4\n\n[image left out: this model reads text only]",
                "[document left out: this model reads text only]",
            ],
        ),
        (
            ChatRequest,
            {"messages": [{"role": "tool", "tool_call_id": "a", "content": [{"type": "image_url", "image_url": {}}]}]},
            ["[image left out: this model reads text only]"],
        ),
        (
            ResponsesRequest,
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "call_id": "a",
                        "output": [{"type": "input_image", "image_url": "x"}, {"type": "input_text", "text": "4"}],
                    }
                ]
            },
            ["[image left out: this model reads text only]\n4"],
        ),
        (
            OllamaChatRequest,
            {"messages": [{"role": "tool", "content": "4", "images": ["aGk=", "aGk="]}]},
            ["4\n\n[image left out: this model reads text only]"],
        ),
    ],
)
def test_what_a_tool_gave_that_is_no_text_is_left_out_and_a_text_says_so(
    kind: Any, body: dict[str, Any], told: list[str]
) -> None:
    """Refused, it would end the conversation: programs send it again with each request."""
    assert [message["content"] for message in convert(body, kind).task().messages] == told
