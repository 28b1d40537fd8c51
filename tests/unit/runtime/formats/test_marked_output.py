"""MarkedOutput: thoughts, content and calls are told apart however the text is split, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import model_output
from edge_run.runtime.formats.marked_output import MarkedOutput

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "</tool_call"}}\n</tool_call>'
TOOLS = {
    "add": {
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "string"},
            "c": {"anyOf": [{"type": "null"}, {"type": "string"}]},
        }
    },
    "sub": {},
}
SUB = '<tool_call>{"name": "sub", "arguments": {}}</tool_call>'


def parsed(text: str, cuts: list[int] | None = None, **options: object) -> tuple[str, str, list[tuple[str, object]]]:
    """Return content, reasoning and calls of a text that comes in pieces."""
    parser = MarkedOutput(**{"tools": TOOLS, **options})  # type: ignore[arg-type]
    return model_output.parsed(parser, text, cuts or ())


TEXTS = {
    "Hello.": ("Hello.", "", []),
    "": ("", "", []),
    " spaces stay \n": (" spaces stay \n", "", []),
    "1 < 2 <tool": ("1 < 2 <tool", "", []),
    f"I add.\n{ADD}": ("I add.", "", [("add", {"a": 1, "b": "</tool_call"})]),
    f"{ADD}\n{SUB}\n": ("", "", [("add", {"a": 1, "b": "</tool_call"}), ("sub", {})]),
    f"<think>\nAdd?\n</think>\n\nYes. {SUB}": ("Yes.", "Add?\n", [("sub", {})]),
    "<think>never ends": ("", "never ends", []),
    "<thinking> is no mark": ("<thinking> is no mark", "", []),
    "say <think> later": ("say <think> later", "", []),
    "<think>a</think>b</think>": ("b</think>", "a", []),
    '<tool_call>{"name": "sub", "arguments": {}}': ("", "", [("sub", {})]),
    '<tool_call>{"name": "sub"}</tool_call>': ("", "", [("sub", {})]),
    '<tool_call>{"name": "sub", "parameters": {"x": 1}}</tool_call>': ("", "", [("sub", {"x": 1})]),
    '<tool_call>{"name": "rm", "arguments": {}}</tool_call>': (
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        "",
        [],
    ),
    '{"name": "sub", "arguments": {}}\n{"name": "add", "arguments": {}}': (
        '{"name": "add", "arguments": {}}',
        "",
        [("sub", {})],
    ),
    '{"name": "sub", "arguments": {}}\nAs in {this}.': ("As in {this}.", "", [("sub", {})]),
    '```json\n{"name": "add",\n "arguments": {"a": {}}}\n```': ("", "", [("add", {"a": {}})]),
    '{"name": "sub", "arguments": {}}': ("", "", [("sub", {})]),
    '{{"name": "sub", "arguments": {}}}': ("", "", [("sub", {})]),
    '<tool_call>{{"name": "sub", "arguments": {"x": {}}}</tool_call>': ("", "", [("sub", {"x": {}})]),
    '```json\n{"name": "Ann"}\n```\nThat is her.': ('```json\n{"name": "Ann"}\n```\nThat is her.', "", []),
    "```python\nprint({})\n```": ("```python\nprint({})\n```", "", []),
    "{": ("{", "", []),
    '{"a": 1, "name": "sub", "arguments": {}}': ('{"a": 1, "name": "sub", "arguments": {}}', "", []),
    '{"type": "function", "name": "sub"}': ("", "", [("sub", {})]),
    '{"name": {"arguments": {}}}{"name": "sub"}': ('{"name": {"arguments": {}}}{"name": "sub"}', "", []),
    f'{{"a": "b"}}\n{SUB}': ('{"a": "b"}', "", [("sub", {})]),
    "{}": ("{}", "", []),
    "<tool_call>{broken</tool_call> on": ("<tool_call>{broken</tool_call> on", "", []),
    '<tool_call>{"name": ["add"]}</tool_call>': ('<tool_call>{"name": ["add"]}</tool_call>', "", []),
    '<tool_call>["add"]</tool_call>': ('<tool_call>["add"]</tool_call>', "", []),
    "Sum.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n\n2 < 3\n\n</parameter>\n"
    "<parameter=c>\n4\n</parameter>\n</function>\n</tool_call>": (
        "Sum.",
        "",
        [("add", {"a": 1, "b": "\n2 < 3\n", "c": "4"})],
    ),
    "<tool_call>add\n<arg_key>b</arg_key>\n<arg_value>1</arg_value>\n<arg_key>c</arg_key><arg_value>null</arg_value>"
    "</tool_call>\n<tool_call>sub<arg_key>x</arg_key>\n<arg_value>[1, {}]</arg_value></tool_call>": (
        "",
        "",
        [("add", {"b": "1", "c": None}), ("sub", {"x": [1, {}]})],
    ),
    "<tool_call>\n<function=sub>\n<parameter=x>\nTrue\n</parameter><parameter=y>\n</parameter>\n</function>": (
        "",
        "",
        [("sub", {"x": True, "y": ""})],
    ),
    "<tool_call>sub\n</tool_call><tool_call>\n<function=sub>\n</function>\n</tool_call>": (
        "",
        "",
        [("sub", {}), ("sub", {})],
    ),
    **{
        f"<tool_call>{text}</tool_call>": (f"<tool_call>{text}</tool_call>", "", [])
        for text in (
            "rm<arg_key>x</arg_key><arg_value>1</arg_value>",
            "sub<arg_key>x</arg_key>",
            "sub, with no argument",
            "subtract",
            "<function=sub><parameter=x>\n1\n</function>",
            "<function=sub><parameter=x>\n1\n</parameter>",
            "<function=rm>\n</function>",
        )
    },
    '<tool_call>{"name": "add", "arguments": "{}"}': ('<tool_call>{"name": "add", "arguments": "{}"}', "", []),
}


@pytest.mark.parametrize("text", TEXTS)
def test_whole(text: str) -> None:
    assert parsed(text) == TEXTS[text]


@given(st.sampled_from([*TEXTS]), st.lists(st.integers(0, 200), max_size=60))
def test_in_pieces(text: str, cuts: list[int]) -> None:
    assert parsed(text, cuts) == TEXTS[text]


@pytest.mark.parametrize("text", TEXTS)
def test_letter_by_letter(text: str) -> None:
    assert parsed(text, [*range(len(text))]) == TEXTS[text]


def test_content_comes_as_soon_as_it_is_certain() -> None:
    parser = MarkedOutput(has_thoughts=False, tools={"add": {}})
    assert [d.content for d in parser.push("Well, <to")] == ["Well,"]
    assert [d.content for d in parser.push("morrow>")] == [" <tomorrow>"]


@pytest.mark.parametrize("marks", [("<tool_call>", "</tool_call>"), ("<|python_tag|>", "")])
def test_json_comes_as_soon_as_it_is_certain_to_be_no_call(marks: tuple[str, str]) -> None:
    answers = ['{"', "nam", 'es": [', '"Ann"]', "}"], ['{"name"', ': "An', 'n"}', " is", " her name."], ["{", "}"]
    for pieces in answers:
        parser = MarkedOutput(tools=TOOLS, marks=marks)
        said = ["".join(delta.content for delta in parser.push(piece)) for piece in pieces]
        assert "".join(said) == "".join(pieces), "nothing is held back until the end"
        assert said[0] == ""
    assert parsed('{"name": "sub"}; {"name": "add"}', marks=("<|python_tag|>", ""))[2] == [("sub", {}), ("add", {})]


def test_an_answer_that_begins_after_a_mark() -> None:
    assert parsed("Hm.</think>Yes.", begins="<think>") == ("Yes.", "Hm.", [])
    assert parsed('{"name": "sub", "arguments": {}}', begins="<tool_call>") == ("", "", [("sub", {})])


def test_marks_that_are_not_asked_for_are_text() -> None:
    for text in (ADD, f"<think>a</think>{SUB}"):
        assert parsed(text, tools={}, has_thoughts=False) == (text, "", [])


def test_only_so_many_calls() -> None:
    assert parsed(SUB + SUB, most_calls=1)[2] == [("sub", {})]
