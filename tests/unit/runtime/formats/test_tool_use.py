"""Tools as programs give them, calls in a conversation, and what a whole answer means."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import pytest

from edge_run.base.errors import ConfigError
from edge_run.base.results import ToolCall
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.marked_output import MarkedOutput
from edge_run.runtime.formats.output import Meaning, OutputParser, PlainOutput
from edge_run.runtime.formats.output import meaning as meaning_of
from edge_run.runtime.formats.tool_format import FORMATS, HERMES, ToolFormat
from edge_run.runtime.formats.tool_use import ToolUse, with_arguments
from edge_run.runtime.formats.tools import FunctionTool, Toolbox
from edge_run.runtime.generation.request import Request, Turn, chat_request, text_request

ADD: dict[str, Any] = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {}}}}
TOOLS: list[Any] = [{"type": "function", "function": ADD}, {"type": "function", "function": {"name": "now"}}]
CHOSEN = {"type": "function", "function": {"name": "now"}}
MESSAGES = [{"role": "user", "content": "What is 1 + 1?"}]


def meaning(parser: OutputParser, pieces: Iterable[str]) -> Meaning:
    """Return what an answer means whose text comes in these pieces."""
    return meaning_of([delta for piece in pieces for delta in parser.push(piece)] + parser.finish())


def test_tools_as_clients_of_openai_write_them() -> None:
    made = Toolbox.of(TOOLS)
    assert made.tools == [FunctionTool("add", "Adds.", ADD["parameters"]), FunctionTool("now")]
    assert not made.is_forced
    assert Toolbox.of(TOOLS, "required").is_forced
    assert Toolbox.of(TOOLS, CHOSEN).callable == [FunctionTool("now")]
    assert Toolbox.of(TOOLS, "none").callable == ()
    assert Toolbox.of(()) == Toolbox([])


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([ADD], "auto", "tools[0]: must be as"),
        ([TOOLS[0], "add"], "auto", "tools[1]: must be as"),
        ([{"function": {"name": 5}}], "auto", "tools[0]: must be as"),
        ([{"function": {"name": "a b"}}], "auto", "tools[0].function.name: 'a b' must be"),
        ([{"function": {"name": "add", "parameters": []}}], "auto", "tools[0].function: description must be text"),
        ([{"function": {"name": "add", "parameters": {"a": {1, 2}}}}], "auto", "tools: must be what JSON can say"),
        ([*TOOLS, TOOLS[0]], "auto", "two tools of one name"),
        (TOOLS, "add", "tool_choice: must be none, auto, required, or"),
        (TOOLS, {"function": {"name": "sub"}}, "tool_choice: names none of the tools"),
        (TOOLS, {"name": "add"}, "tool_choice: must be none, auto, required, or"),
        ((), "required", "tool_choice: names none of the tools"),
    ],
)
def test_tools_that_cannot_be_are_refused_at_once(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chat_request(MESSAGES, tools=tools, tool_choice=choice)
    assert message in str(caught.value)


def test_a_text_calls_nothing() -> None:
    with pytest.raises(ConfigError, match="tools: are for the answer of a conversation"):
        text_request("Once", tools=TOOLS)
    with pytest.raises(ConfigError, match="tools: are for the answer of a conversation"):
        Request([1, 2], tools=TOOLS)
    with pytest.raises(ConfigError, match="tools 5: must be a list"):
        chat_request(MESSAGES, tools=5)


def test_a_call_that_must_be_made_has_no_other_form() -> None:
    use = ToolUse(HERMES.sign, Toolbox.of(TOOLS, "required"))
    assert json.loads(use.sampling(SamplingConfig()).json_schema_text)["anyOf"]
    for asked in (SamplingConfig(grammar='root ::= "a"'), SamplingConfig(json_schema={"type": "object"})):
        with pytest.raises(ConfigError, match=r"^tool_choice: a call that must be made has a form already"):
            use.sampling(asked)
    with pytest.raises(ConfigError, match=r"^grammar: the answer could call no tool"):
        chat_request(MESSAGES, tools=TOOLS, grammar='root ::= "a"')
    with pytest.raises(ConfigError, match=r"^JSON schema: Expecting"):
        ToolUse(HERMES.sign, Toolbox.of(TOOLS)).sampling(SamplingConfig(json_schema="{bad"))


def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(450):
        deep = {"properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "add", "parameters": deep}}
    with pytest.raises(ConfigError, match=r"^tools: a schema of parameters is nested too deep"):
        Toolbox.of([tool], "required").forced_schema(HERMES)


def test_tools_that_change_while_a_request_waits_stay_what_they_were() -> None:
    parameters = {"properties": {"a": {}}}
    request = chat_request(MESSAGES, tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    parameters["properties"]["b"] = {}
    assert request.toolbox.schemas == {"f": {"properties": {"a": {}}}}


def test_no_tools_are_as_none() -> None:
    assert chat_request(MESSAGES, tools=None, tool_choice=None) == chat_request(MESSAGES)


@pytest.mark.parametrize("waited_s", [5, math.inf])
def test_a_request_whose_time_is_over_must_call_nothing(waited_s: float) -> None:
    """It would wait for the grammar of its call."""
    late = chat_request(MESSAGES, tools=TOOLS, tool_choice=CHOSEN, turn=Turn(deadline_s=5)).after(waited_s)
    assert not late.toolbox.is_forced
    assert late.tools == tuple(TOOLS)
    assert chat_request(MESSAGES, tools=TOOLS, tool_choice="none", deadline_s=5).after(waited_s).tool_choice == "none"


def calling(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "f", **arguments}}]}


@pytest.mark.parametrize("arguments", [{"arguments": '{"a": 1}'}, {"arguments": {"a": 1}}])
def test_templates_have_arguments_as_objects(arguments: Any) -> None:
    message = calling(arguments)
    (call,) = with_arguments(0, message)["tool_calls"]
    assert call == {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert message == calling(arguments), "what was given stays as it was"
    assert with_arguments(0, calling({}))["tool_calls"][0]["function"]["arguments"] == {}
    assert with_arguments(0, MESSAGES[0]) is MESSAGES[0]


def test_identities_that_are_none_are_left_out() -> None:
    """As they are in what pydantic makes of a message."""
    assert with_arguments(0, {**MESSAGES[0], "tool_call_id": None, "tool_calls": None})["tool_calls"] is None
    assert "tool_call_id" not in with_arguments(0, {**MESSAGES[0], "tool_call_id": None})
    (call,) = with_arguments(0, {"tool_calls": [{"id": None, "function": {"name": "f"}}]})["tool_calls"]
    assert call["id"] == ""


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (calling({"arguments": "{"}), "chat message 3: the arguments of f are not JSON"),
        (calling({"arguments": "[1]"}), "chat message 3: the arguments of f must be an object"),
        (calling({"name": 1}), "chat message 3: a call must be as"),
        ({"role": "assistant", "tool_calls": ["f"]}, "chat message 3: a call must be as"),
        ({"role": "assistant", "tool_calls": 5}, "chat message 3: tool_calls must be a list"),
        (calling({"arguments": {"a": {1}}}), "chat message 3: the arguments of f: must be what JSON can say"),
        ({"role": "tool", "tool_call_id": 5}, "chat message 3: tool_call_id must be text"),
        ({"tool_calls": [{"id": 5, "function": {"name": "f"}}]}, "chat message 3: the id of a call must be text"),
    ],
)
def test_calls_that_cannot_be_are_refused(message: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_arguments(3, message)


@pytest.mark.parametrize("form", FORMATS, ids=[form.sign for form in FORMATS])
def test_a_template_that_knows_tools_is_given_them(form: ToolFormat) -> None:
    messages, variables = ToolUse(form.sign, Toolbox.of(TOOLS)).told(MESSAGES)
    assert list(messages) == MESSAGES
    assert [tool["function"]["name"] for tool in variables["tools"]] == ["add", "now"]
    assert ToolUse(form.sign).told(MESSAGES) == (MESSAGES, {})


def test_a_template_that_knows_none_is_told_in_words() -> None:
    assert ToolUse("").told(MESSAGES) == (MESSAGES, {})
    messages, variables = ToolUse("", Toolbox.of(TOOLS)).told(MESSAGES)
    assert variables == {}
    assert '"name": "add"' in messages[0]["content"]
    assert messages[1:] == MESSAGES


def test_of_a_call_that_was_cut_off_the_mark_that_was_given_is_no_content() -> None:
    for form in FORMATS[1:4]:
        use = ToolUse(form.sign, Toolbox.of(TOOLS, "required"))
        assert meaning(use.parser(form.begins, form.begins)(), []) == ("", "", ())
        assert meaning(use.parser(form.begins, form.begins)(), ['{"name": "a']).content == '{"name": "a'


def test_a_bare_call_may_be_long_where_it_names_a_tool() -> None:
    """As of a file that is written. What names none is taken for text after a while."""
    call = json.dumps({"name": "add", "arguments": {"a": "x" * 20_000}})
    (found,) = meaning(MarkedOutput(tools={"add": {}}), call).calls
    assert len(found.arguments) > 20_000
    assert meaning(MarkedOutput(tools={"now": {}}), call).content == call


def test_the_meaning_of_a_whole_answer() -> None:
    parser = MarkedOutput(tools={"add": {}}, identity=lambda: "call_1")
    text = '<think>Hm.</think>I add.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert meaning(parser, [text]) == ("I add.", "Hm.", (ToolCall("call_1", "add", '{"a": 1}', {"a": 1}),))
    assert meaning(PlainOutput(), [*text]) == (text, "", ())
    assert meaning(PlainOutput(), []) == ("", "", ())
