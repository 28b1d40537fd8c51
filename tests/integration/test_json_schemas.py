"""What grammars of JSON schemas take and refuse, by llama.cpp's own grammar on the vocabulary of a small model."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_run.base.errors import ConfigError
from edge_run.runtime.formats.tool_format import FORMATS, HERMES, PYTHON_TAG, ToolFormat
from edge_run.runtime.formats.tools import Chosen, FunctionTool, Toolbox
from edge_run.runtime.grammars.schema_grammar import ALTERNATIVES, schema_grammar
from json_grammars import Takes, written

MISTRAL = FORMATS[3]
COLOUR = {"enum": ["red", "green"], "title": "Colour", "type": "string"}
POINT = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "title": "Point"}


def object_of(definitions: dict[str, Any] | None = None, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object, all of whose properties must be there."""
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {**schema, "$defs": definitions} if definitions else schema


TEXTS = ["C:\\new", "a\nb", "a\r\n\tb", 'say "hi"', "\\d", "\\", '\\"', "😀", "ö", "\x01", "\x7f", "\u2028", "[^a]", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_a_schema_are_written_as_json(takes: Takes, text: str) -> None:
    assert takes({"enum": ["other", text]}, written(text))
    assert takes({"const": text}, written(text))
    assert takes({"const": {text: [text]}}, written({text: [text]}))
    assert takes(object_of(**{text: COLOUR}), written({text: "red"}))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
@settings(max_examples=50)
def test_any_text_is_written_as_json(takes: Takes, text: str) -> None:
    assert takes({"enum": [text]}, written(text))
    assert takes(object_of(**{text: COLOUR}), written({text: "red"}))


def test_no_other_text_is_taken_for_one_with_a_backslash(takes: Takes) -> None:
    assert not takes({"enum": ["C:\\new"]}, r'"C:\new"'), "which means a line break"
    assert not takes({"enum": ["a\\d"]}, r'"a\d"'), "which is no JSON"


REFERS = {"$ref": "#/$defs/Colour"}
WAYS = [{"required": ["y"]}, {"properties": {"z": {"enum": [4]}}}]
COLOURS = {"Colour": COLOUR, "Point": POINT}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        # pydantic before 2.9, for what has a default or a description, and pydantic 1
        (object_of(COLOURS, c={"allOf": [REFERS], "default": "red"}), [{"c": "red"}], [{"c": {}}, {"c": "blue"}]),
        (
            {**object_of(c={"title": "C", "allOf": [{"$ref": "#/definitions/Colour"}]}), "definitions": COLOURS},
            [{"c": "green"}],
            [{"c": {}}],
        ),
        (object_of(COLOURS, p={"allOf": [{"$ref": "#/$defs/Point"}]}), [{"p": {"x": 1}}], [{"p": {}}, {"p": {"x": 3}}]),
        (object_of(c={"type": "string", "allOf": [{"pattern": "^[ab]$"}]}), [{"c": "a"}], [{"c": "c"}, {"c": {}}]),
        (object_of(c={"allOf": [{"allOf": [COLOUR]}, {"description": "d"}]}), [{"c": "red"}], [{"c": {}}]),
        (
            object_of(c={"type": "integer", "allOf": [{"minimum": 1}, {"minimum": 0, "maximum": 3}]}),
            [{"c": 1}, {"c": 3}],
            [{"c": 0}, {"c": 4}],
        ),
        (object_of(c={"type": "string", "maxLength": 2, "allOf": [{"maxLength": 3}]}), [{"c": "ab"}], [{"c": "abc"}]),
        (
            object_of(c={"type": "string", "allOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}),
            [{"c": "b"}],
            [{"c": "a"}, {"c": "c"}],
        ),
        # one that inherits: properties beside allOf, and one level further
        (
            {**object_of(COLOURS, y={"enum": [3]}), "allOf": [{"$ref": "#/$defs/Point"}]},
            [{"x": 1, "y": 3}],
            [{"y": 3}, {"x": 1}],
        ),
        (
            {"allOf": [{"allOf": [POINT, object_of(y={"enum": [3]})]}, object_of(z={"enum": [4]})]},
            [{"x": 1, "y": 3, "z": 4}],
            [{"z": 4}],
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/Way"}, POINT],
                "$defs": {"Way": {**object_of(y={"enum": [3]}), "oneOf": WAYS}},
            },
            [{"y": 3, "x": 1}, {"y": 3, "x": 1, "z": 4}],
            [{"x": 1, "z": 4}, {"x": 1}],
        ),
        # conditions are what a grammar cannot say
        ({**object_of(y={"enum": [3]}), "allOf": [{"if": {}, "then": {}}]}, [{"y": 3}], [{}]),
        ({"allOf": [{"if": {}, "then": {}}]}, [{"y": 3}, {}], ["y"]),
    ],
)
def test_what_is_said_by_all_of(takes: Takes, schema: Any, right: list[Any], wrong: list[Any]) -> None:
    assert all(takes(schema, written(value)) for value in right)
    assert not any(takes(schema, written(value)) for value in wrong)


WAYS_TO_NEXT = {
    "parts": lambda one: {"allOf": [one, one]},
    "properties": lambda one: object_of(a={"allOf": [one, {"required": ["a"]}]}, b={"allOf": [one, POINT]}),
}


@pytest.mark.parametrize("way", WAYS_TO_NEXT)
def test_definitions_that_double_at_each_reference_are_refused_at_once(way: str) -> None:
    to_next: Any = WAYS_TO_NEXT[way]
    definitions = {f"d{n}": to_next({"$ref": f"#/$defs/d{n + 1}"}) for n in range(40)}
    schema = {"$defs": {**definitions, "d40": POINT}, **to_next({"$ref": "#/$defs/d0"})}
    began_s = time.process_time()
    with pytest.raises(ConfigError, match=r"^JSON schema: consists of more than 20,000 schemas, .*; simplify it$"):
        schema_grammar(json.dumps(schema))
    assert time.process_time() - began_s < 20, "there are 2 to the power of 40"


@pytest.mark.parametrize("part", [{"type": "string"}, {"items": {"type": "string"}}, {"enum": [1]}])
def test_all_of_what_are_not_objects_is_refused(part: Any) -> None:
    with pytest.raises(ConfigError, match="JSON schema: allOf: not all of it are objects"):
        schema_grammar(json.dumps({"allOf": [POINT, part]}))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": ["string", "null"], "enum": ["x", None]}, ["x", None], ["y"]),
        ({"type": ["string", "null"], "const": "x"}, ["x"], ["y"]),
        ({"type": ["string", "null"], "pattern": "^[ab]$"}, ["a", None], ["c"]),
        ({"type": ["string", "null"], "maxLength": 2}, ["ab", None], ["abc"]),
        ({**POINT, "type": ["object", "null"]}, [{"x": 1}, None], [{}, {"x": 3}, {"y": 1}]),
        ({"type": ["array", "null"], "items": {"enum": [1]}}, [[1, 1], None], [[2], ["a"]]),
        ({"type": ["object", "null"], "allOf": [POINT]}, [{"x": 1}, None], [{}]),
        ({"type": ["string", "null"], "description": "any"}, ["y", None], [1]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}, [1, None], ["x"]),
    ],
)
def test_what_may_be_null(takes: Takes, schema: Any, right: list[Any], wrong: list[Any]) -> None:
    one = object_of(one=schema)
    assert all(takes(schema, written(value)) and takes(one, written({"one": value})) for value in right)
    assert not any(takes(schema, written(value)) or takes(one, written({"one": value})) for value in wrong)


LINKED = object_of(value={"enum": [1]}, next={"anyOf": [{"$ref": "#/$defs/linked_list_node"}, {"type": "null"}]})


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        # a definition and a property, or a rule of llama.cpp's, that have one name
        (object_of({"a": {"enum": [2]}}, a={"enum": [1]}, b={"$ref": "#/$defs/a"}), {"a": 1, "b": 2}, {"a": 1, "b": 1}),
        (object_of({"value": {"enum": [2]}}, a={}, b={"$ref": "#/$defs/value"}), {"a": {}, "b": 2}, {"a": {}, "b": 1}),
        (object_of({"space": {"enum": [2]}}, b={"$ref": "#/$defs/space"}), {"b": 2}, {"b": 1}),
        (
            {**object_of({"a": {"enum": [2]}}, b={"$ref": "#/$defs/a"}, c={"$ref": "#/x/a"}), "x": {"a": {"const": 3}}},
            {"b": 2, "c": 3},
            {"b": 2, "c": 2},
        ),
        # ones that refer to themselves: OpenAI's example, pydantic's at the root, the root itself
        (
            object_of({"linked_list_node": LINKED}, linked_list={"$ref": "#/$defs/linked_list_node"}),
            {"linked_list": {"value": 1, "next": {"value": 1, "next": None}}},
            {"linked_list": {"value": 1, "next": {}}},
        ),
        (
            {"$defs": {"linked_list_node": LINKED}, "$ref": "#/$defs/linked_list_node"},
            {"value": 1, "next": {"value": 1, "next": None}},
            {"value": 1, "next": 1},
        ),
        ({"properties": {"child": {"$ref": "#"}}}, {"child": {"child": {}}}, {"child": 1}),
        (object_of({"a/b c": {"enum": [2]}}, b={"$ref": "#/$defs/a~1b%20c"}), {"b": 2}, {"b": 1}),
        (
            object_of(a={"anyOf": [{"enum": [2]}]}, b={"$ref": "#/properties/a/anyOf/0"}),
            {"a": 2, "b": 2},
            {"a": 2, "b": 1},
        ),
    ],
)  # fmt: skip
def test_references_lead_to_what_they_name(takes: Takes, schema: Any, right: Any, wrong: Any) -> None:
    assert takes(schema, written(right))
    assert not takes(schema, written(wrong))


def test_a_definition_may_have_the_name_of_a_property_within(takes: Takes) -> None:
    a, a_x = object_of(x={"enum": [1]}), object_of(first={"$ref": "#/$defs/a"}, again={"const": 2})
    schema = object_of({"a": a, "a_x": a_x}, one={"$ref": "#/$defs/a_x"}, two={"$ref": "#/$defs/a"})
    assert takes(schema, written({"one": {"first": {"x": 1}, "again": 2}, "two": {"x": 1}}))
    assert not takes(schema, written({"one": {"x": 1}, "two": {"x": 1}}))


INTS = {"type": "integer"}
OPEN = {"type": "object", "properties": {"age": INTS, "a": INTS}, "additionalProperties": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        # any value at all: pydantic's Any and list, zod's any(), OpenAPI's free forms
        ({}, [1, "x", None, [{"a": []}]], []),
        (object_of(a={"title": "A"}), [{"a": 1}, {"a": {"b": [True]}}], [{}]),
        ({"type": "array", "items": {}}, [[], [1, "x", None]], [{}]),
        ({"type": "array", "items": {}, "minItems": 2}, [[1, {}]], [[1]]),
        (
            {"properties": {"a": {"enum": [1]}}, "additionalProperties": True},
            [{"a": 1, "z": [3]}, {"z": 3}],
            [{"a": 2}],
        ),
        ({"type": "object", "additionalProperties": True}, [{}, {"a": {"b": 1}}], [1]),
        ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
        # further properties beside those that are named, which may not come by another type
        (OPEN, [{}, {"age": 1}, {"age": 1, "a": 2, "b": "x", "c": "y"}, {"ag": "x"}, {"ages": "x"}, {"": "x"}], []),
        (OPEN, [{"b": "x"}, {"a": 2, "é": "x"}], [{"age": "x"}, {"a": "x"}, {"b": 1}, {"age": 1, "b": 2}]),
        ({**OPEN, "required": ["a"]}, [{"a": 2}, {"a": 2, "age": 1}, {"a": 2, "b": "x"}], [{}, {"a": 1, "a ": 1}]),
        ({**OPEN, "properties": {'x"y': INTS}}, [{"x": "s"}, {"xy": "s"}, {'x"y': 2}], [{'x"y': "s"}]),
        ({"properties": {"n" * 80: INTS}, "additionalProperties": True}, [{"n": 2}, {"n" * 80: 1}], [{"n" * 80: ""}]),
        (
            {**OPEN, "properties": {"n" * 64: INTS, "n" * 65: INTS}},
            [{"n" * 63: "x"}, {"n" * 64: 1}],
            [{"n" * 64: "x"}, {"n" * 65: "x"}],
        ),
        # lengths
        ({"maxLength": 2}, ["", "ab"], ["abc", 1]),
        ({"type": "string", "minLength": 2}, ["ab", "abc"], ["a"]),
        ({"type": "string", "maxLength": 1500}, ["", "ab"], [1]),
        ({"type": "string", "maxLength": 5000}, ["", "ab"], [1]),
        ({"type": "array", "items": INTS, "maxItems": 1500}, [[], [1, 2]], [["a"]]),
        ({"type": "array", "items": INTS, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
        ({"type": "array", "maxItems": 0}, [[]], [[1]]),
        ({"prefixItems": [INTS, {"type": "string"}]}, [[1, "a"]], [[1], ["a", 1]]),
        ({"type": "string", "pattern": "^[a-z]{0,1500}$"}, ["", "abc"], ["A"]),
        ({"type": "string", "pattern": "^(ab|c{,2}){2}$"}, ["abab", "cccc", "abc", ""], ["ababab", "ccccc"]),
        ({"type": "string", "pattern": "^([a-z]{1,50}-){1,50}$"}, ["a-", "a-b-"], ["a", "-"]),
        (
            object_of(v={"type": "string", "pattern": "^[0-9]+(,[0-9]+|){0,3}(){2}$"}, w=INTS),
            [{"v": "1,2", "w": 1}, {"v": "1", "w": 1}],
            [{"v": ",1", "w": 1}],
        ),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, [0, 10**15], [-1]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}, [-(10**15), 10**15], ["x"]),
        # formats
        ({"type": "string", "format": "date"}, ["2026-11-29"], ["2026-13-29", "29 Nov"]),
        ({"format": "date-time"}, ["2026-11-29T02:10:00Z"], ["2026-11-29", 1]),
        ({"format": "uuid4"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
        ({"type": "string", "format": "email"}, ["a@b", "x"], [1]),
    ],
)
def test_what_schemas_say(takes: Takes, schema: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [value for value in right if not takes(schema, written(value))] == []
    assert [value for value in wrong if takes(schema, written(value))] == []


BOUND = st.none() | st.integers(-1200, 1200)


@given(BOUND, BOUND, st.booleans(), st.lists(st.integers(-1300, 1300), min_size=1, max_size=6))
@settings(max_examples=150)
def test_whole_numbers_stay_within_their_bounds(
    takes: Takes, low: int | None, high: int | None, is_beyond: bool, numbers: list[int]
) -> None:
    first, last = ("exclusiveMinimum", "exclusiveMaximum") if is_beyond else ("minimum", "maximum")
    schema = {"type": "integer", **({} if low is None else {first: low}), **({} if high is None else {last: high})}
    least, most = -(10**16) if low is None else low + is_beyond, 10**16 if high is None else high - is_beyond
    if least > most:
        with pytest.raises(ConfigError, match="there are none"):
            schema_grammar(json.dumps(schema))
        return
    for number in [*numbers, least, most, least - 1, most + 1]:
        if abs(number) < 10**16:
            assert takes(schema, str(number)) == (least <= number <= most), (schema, number)


def test_bounds_may_be_fractions_and_truth_values(takes: Takes) -> None:
    assert [n for n in range(6) if takes({"type": "integer", "minimum": 1.2, "maximum": 3.9}, str(n))] == [2, 3]
    once = {"type": "integer", "minimum": 1, "exclusiveMinimum": True, "maximum": 3, "exclusiveMaximum": False}
    assert [n for n in range(6) if takes(once, str(n))] == [2, 3]
    assert takes({"type": ["integer", "null"], "minimum": 1}, "null")


def test_json_is_one_line_and_ends_with_its_last_bracket(takes: Takes) -> None:
    assert takes(object_of(a=INTS, b=INTS), '{ "a" : 1, "b":2 }')
    assert not takes(object_of(a=INTS), json.dumps({"a": 1}, indent=2))
    assert not takes(object_of(a=INTS), '{"a": 1} ')


def tool(name: str, items: list[str]) -> FunctionTool:
    """Return a tool with a definition that others have by that name, and references to a property and to itself."""
    item = object_of(kind={"enum": items}, more={"anyOf": [{"$ref": "#"}, {"type": "null"}]})
    schema = object_of({"Item": item}, x={"$ref": "#/$defs/Item"}, y={"$ref": "#/properties/x"})
    return FunctionTool(name, None, schema)


def call_of(name: str, kind: str) -> dict[str, Any]:
    item = {"kind": kind, "more": None}
    return {"name": name, "arguments": {"x": {**item, "more": {"x": item, "y": item}}, "y": item}}


def test_each_tool_has_its_own_definitions(takes: Takes) -> None:
    tools = Toolbox([tool("one", ["a"]), tool("other.one", ["b"])], "required")
    schema = json.loads(tools.forced_schema(HERMES))
    assert takes(schema, written(call_of("one", "a")))
    assert takes(schema, written(call_of("other.one", "b")))
    assert not takes(schema, written(call_of("one", "b")))
    assert not takes(schema, written(call_of("other.one", "a")))
    listed = json.loads(tools.forced_schema(MISTRAL))
    assert takes(listed, written([call_of("one", "a")]))
    assert not takes(listed, written([call_of("one", "b")]))
    single = json.loads(Toolbox(tools.tools, Chosen("one")).forced_schema(HERMES))
    assert takes(single, written(call_of("one", "a")))


@pytest.mark.parametrize("form", FORMATS, ids=[form.sign for form in FORMATS])
def test_an_answer_to_a_schema_may_be_a_call_instead(form: ToolFormat, takes: Takes) -> None:
    add, now = object_of(a={"enum": [1]}), object_of()
    tools = Toolbox([FunctionTool("add", None, add), FunctionTool("now", None, now)])
    schema = json.loads(tools.call_or_schema(form, written(POINT)))
    (forced, *_) = forms = json.loads(tools.forced_schema(form)).get(ALTERNATIVES, [{"text": "", "schema": None}])
    call = {"name": "add", "arguments": {"a": 1}, "parameters": {"a": 1}}
    del call["arguments" if form.sign == PYTHON_TAG else "parameters"]
    made = call["arguments"] if len(forms) > 1 else [call] if form is MISTRAL else call
    assert takes(schema, f'{form.answer_begins}{{"x": 1}}')
    assert takes(schema, f"{form.begins}{forced['text']}{written(made)}")
    assert not takes(schema, f"{form.answer_begins}{{}}")
    assert takes(schema, f"{form.begins}{forced['text']}{written(made).replace('1', '[2]')}"), "arguments of any kind"
    assert not takes(schema, f"{form.begins}{forced['text']}3")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "https://example.com/schema.json"}, "must begin with #/"),
        ({"$ref": "#nowhere"}, "must begin with #/"),
        ({"$ref": "#/$defs/a"}, r"leads nowhere, there is no '\$defs'"),
        ({"properties": {"a": True}}, "'True' is none"),
        ({"allOf": ["a"]}, "'a' is none"),
        (["a"], "must be an object"),
        ({"type": "text"}, "there is no such type"),
        ({"const": math.nan}, "Out of range float values"),  # which answers had, and nobody could read
        ({"enum": []}, "enum: is empty"),
        ({"anyOf": []}, "anyOf: is empty"),
        ({"type": "string", "minLength": -1}, "minLength and maxLength: must be whole numbers"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "at least 3 and at most 2"),
        ({"type": "array", "minItems": 2001}, "at most 2,000 can be asked for"),
        ({"type": "integer", "minimum": 10**17}, "leave it out"),
    ],
)
def test_what_a_schema_cannot_say_is_one_clear_line(schema: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^JSON schema: .*{reason}") as caught:
        schema_grammar(json.dumps(schema))
    assert "\n" not in str(caught.value)
