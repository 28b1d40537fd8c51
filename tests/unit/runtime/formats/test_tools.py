"""Toolbox: what may be called, what a call looks like, and how a template that knows no tools is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_run.base.errors import ConfigError
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.tool_format import FORMATS, HERMES, ToolFormat
from edge_run.runtime.formats.tools import Chosen, FunctionTool, Toolbox
from edge_run.runtime.grammars.schema_grammar import schema_grammar
from edge_run.runtime.server.apis.anthropic_messages import CountRequest
from edge_run.runtime.server.apis.ollama import OllamaChatRequest
from edge_run.runtime.server.apis.openai_chat import ChatRequest
from edge_run.runtime.server.apis.responses import ResponsesRequest
from edge_run.runtime.server.bodies import convert, decode
from edge_run.runtime.server.refusals import Refusal

NUMBER = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
DOUBLE, NOW = FunctionTool("double", "Doubles n.", NUMBER), FunctionTool("now")


def toolbox(**fields: Any) -> Toolbox:
    messages = [{"role": "user", "content": "Hello"}]
    request = decode(json.dumps({"messages": messages, **fields}).encode(), ChatRequest)
    request.sampling(SamplingConfig())
    made = request.toolbox()
    made.check()
    return made


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def test_choices() -> None:
    tools = [tool("double", description="Doubles n.", parameters=NUMBER), tool("now")]
    assert toolbox(tools=tools).callable == [DOUBLE, NOW]
    assert not toolbox(tools=tools).is_forced
    assert toolbox(tools=tools, tool_choice="none").callable == ()
    assert toolbox(tools=tools, tool_choice="required").is_forced
    named = toolbox(tools=tools, tool_choice={"type": "function", "function": {"name": "now"}})
    assert (named.callable, named.is_forced) == ([NOW], True)
    assert not toolbox(tools=tools, parallel_tool_calls=False).is_parallel
    assert not toolbox(tool_choice="auto").callable


@pytest.mark.parametrize("word", ["auto", "none", "required"])
def test_a_tool_may_be_called_as_a_choice_is(word: str) -> None:
    tools, messages = [tool(word), tool("now")], [{"role": "user", "content": "Hello"}]
    functions = [one["function"] for one in tools]
    flat = [{"type": "function", **one} for one in functions]
    choice = {"type": "tool", "name": word}
    for made in (
        Toolbox.of(tools, tool(word)),
        toolbox(tools=tools, tool_choice=tool(word)),
        convert({"input": "Hello", "tools": flat, "tool_choice": flat[0]}, ResponsesRequest).task().toolbox,
        convert({"messages": messages, "tools": functions, "tool_choice": choice}, CountRequest).task().toolbox,
    ):
        made.check()
        assert ([one.name for one in made.callable], made.is_forced) == ([word], True)
    assert len(Toolbox.of(tools, "auto").callable) == 2


@pytest.mark.parametrize("name", ["bad name", "x" * 129, "", "a\n"])
def test_a_name_that_cannot_be_is_refused_where_it_is(name: str) -> None:
    tools = [tool("now"), tool(name)]
    with pytest.raises(ConfigError, match=r"^tools\[1\]\.function\.name: "):
        Toolbox.of(tools)
    for kind in (ChatRequest, OllamaChatRequest):
        with pytest.raises(Refusal) as caught:
            convert({"messages": [{"role": "user", "content": "Hello"}], "tools": tools}, kind)
        assert (caught.value.status, caught.value.param) == (400, "tools[1].function.name")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "web_search"}]},
        {"tools": [tool("a"), tool("a")]},
        {"tools": [tool(f"t{n}") for n in range(129)]},
        {"tools": [tool("a", parameters={"x": "y" * 600_000})]},
        {"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}},
        {"tools": [tool("a")], "tool_choice": "any"},
        {"tool_choice": "required"},
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises((Refusal, ConfigError)):
        toolbox(**fields)


def test_the_schema_of_a_call_is_one_that_a_grammar_can_be_made_of() -> None:
    one = json.loads(Toolbox([DOUBLE, NOW], Chosen("double")).forced_schema(HERMES))
    assert one["properties"]["name"] == {"const": "double"}
    assert one["properties"]["arguments"] == {"$ref": "#/$defs/double"}
    assert one["$defs"]["double"]["$defs"] == NUMBER["$defs"]
    assert one["$defs"]["double"]["properties"] == {"n": {"$ref": "#/$defs/double/$defs/n"}}, "where that is"
    grammar = schema_grammar(Toolbox([DOUBLE, NOW], "required").forced_schema(HERMES))
    assert r"\"double\"" in grammar
    assert r"\"now\"" in grammar


@pytest.mark.parametrize("form", FORMATS, ids=[form.sign for form in FORMATS])
@pytest.mark.parametrize(
    "arguments",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": r"\d+"}}},
        {"type": "object", "properties": {"a": {"type": "any"}}},
        {"$ref": "https://example.com/arguments.json"},
        {"type": "object", "description": "y" * 70_000},
    ],
    ids=["pattern", "type", "reference", "length"],
)
def test_a_call_that_may_be_made_beside_a_schema_needs_no_grammar_of_its_arguments(
    form: ToolFormat, arguments: dict[str, Any]
) -> None:
    made = toolbox(tools=[tool("double", parameters=arguments), tool("now")])
    with pytest.raises(ConfigError):
        schema_grammar(made.forced_schema(form))
    grammar = schema_grammar(made.call_or_schema(form, json.dumps(NUMBER)))
    assert "double" in grammar
    assert "now" in grammar


def test_a_call_that_must_be_made_has_a_schema_of_bounded_length() -> None:
    long = toolbox(tools=[tool("a", parameters={"x": "y" * 70_000})], tool_choice="required")
    with pytest.raises(ConfigError, match="65,536 letters"):
        long.forced_schema(HERMES)


def test_a_template_that_knows_no_tools_is_told_in_words() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "double", "arguments": {"n": 2}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    system, calls, result = Toolbox([DOUBLE]).told(messages)
    assert system["content"].startswith("Be brief.\n\n")
    assert json.dumps(DOUBLE.document()["function"]) in system["content"]
    assert calls == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "double", "arguments": {"n": 2}}\n</tool_call>',
    }
    assert result == {"role": "user", "content": "<tool_response>\n4\n</tool_response>"}
    (system, user) = Toolbox([NOW]).told([{"role": "user", "content": "Hi"}])
    assert (system["role"], user) == ("system", {"role": "user", "content": "Hi"})
    assert Toolbox().told(messages[:1]) == messages[:1]


def test_results_of_calls_are_one_message_with_what_the_user_says_beside_them() -> None:
    """Such templates want the user and the assistant to take turns."""
    results = [{"role": "tool", "content": text, "tool_call_id": text} for text in ("4", "6")]
    asked, answered = {"role": "user", "content": "Go on."}, {"role": "assistant", "content": "I see."}
    _, said, _, last = Toolbox([DOUBLE]).told([*results, asked, answered, asked])
    assert said["role"] == "user"
    assert [said["content"].index(text) for text in (">\n4", ">\n6", "\nGo on.")] == sorted(
        said["content"].index(text) for text in (">\n4", ">\n6", "\nGo on.")
    )
    assert last == asked
