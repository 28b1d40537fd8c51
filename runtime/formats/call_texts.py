"""Calls of functions as the makers of models have them written: JSON, lists of it, or a name before its arguments.

The arguments after a name are JSON, or each of them is between tags.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from edge_run.base import strict_json
from edge_run.base.results import ToolCall

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAMED = re.compile(  # no two runs of white space in a row: where they end in nothing, each length of both is tried
    rf"([\w.-]{{1,128}})\s*(?:{re.escape(CALL_ID)}\w{{1,64}}\s*)?(?:{re.escape(ARGS)}\s*)?(?=\{{)"
)
_TAGGED = re.compile(r"<function=([\w.-]{1,128})>(.*)</function>|([\w.-]{1,128})(?![\w.-])(.*)", re.DOTALL)
_ARGUMENT = re.compile(
    r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*"
    r"|<arg_key>([^<>]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*",
    re.DOTALL,
)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # which some templates write instead of JSON's
_BETWEEN = " \t\r\n;,"
Called: TypeAlias = "tuple[str, dict[str, Any]]"  # the name of a function, and the arguments
MOST_WAYS = 64  # of an argument's schema that are looked at, anew for each argument


def new_call_identity() -> str:
    """Return a name for a call that no other call has."""
    return f"call_{secrets.token_hex(12)}"


def dumped(value: Any) -> str:
    """Return JSON as models write it."""
    return json.dumps(value, ensure_ascii=False)


def made_call(identity: str, name: str, arguments: dict[str, Any]) -> ToolCall:
    """Return a call as answers have it."""
    return ToolCall(identity, name, dumped(arguments), arguments)


def called(value: Mapping[str, Any], tools: Collection[str]) -> Called | None:
    """Return what a JSON object calls; None where it is no call."""
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        return None
    return name, arguments


def read_calls(text: str, tools: Collection[str]) -> list[Called] | None:
    """Return the calls in a text that holds nothing else; None where it holds something else, or a tool that is none.

    {"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}
    [{"name": "add", "arguments": {"a": 1}}]
    add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}
    """
    found: list[Called] = []
    rest = text.strip(_BETWEEN)
    while rest:
        rest = rest.removeprefix(CALLS).lstrip(_BETWEEN)
        named = _NAMED.match(rest)
        start = named.end() if named else 0
        try:
            value, end = strict_json.parse_first(rest, start)
        except ValueError:
            return None
        values = [{"name": named[1], "arguments": value}] if named else value if isinstance(value, list) else [value]
        calls = [called(one, tools) if isinstance(one, dict) else None for one in values]
        if None in calls or not calls:
            return None
        found += [call for call in calls if call]
        rest = rest[end:].lstrip(_BETWEEN)
    return found or None


def tagged_call(text: str, tools: Mapping[str, Mapping[str, Any]]) -> Called | None:
    """Return what a text calls whose arguments are between tags; None where it is no call.

    <function=add> <parameter=a> 1 </parameter> <parameter=b> 2 </parameter> </function>
    add <arg_key>a</arg_key> <arg_value>1</arg_value> <arg_key>b</arg_key> <arg_value>2</arg_value>

    The first is Qwen3-Coder's, with line breaks where spaces are here, the second GLM's. tools: the JSON schemas of the
    arguments, by names.
    """
    if (found := _TAGGED.fullmatch(text.strip())) is None or (name := found[1] or found[3]) not in tools:
        return None
    properties, arguments = tools[name].get("properties"), dict[str, Any]()
    rest = (found[2] or found[4] or "").strip()
    at = 0
    while at < len(rest):
        if (argument := _ARGUMENT.match(rest, at)) is None:
            return None
        key, value = (argument[1], argument[2]) if argument[1] else (argument[3], argument[4])
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        arguments[key] = _argument(value, _kinds(schema))
        at = argument.end()
    return name, arguments


def _argument(text: str, kinds: Collection[str]) -> Any:
    """Return what an argument is that was written without quotes, where its schema allows values of these kinds."""
    is_text = "string" in kinds and not {*kinds} - {"string", "null"}
    if is_text and (text != "null" or "null" not in kinds):
        return text
    try:
        return strict_json.parse(_PYTHON_WORDS.get(text, text))
    except ValueError:
        return text


def _kinds(schema: Any) -> set[str]:
    """Return what JSON schema calls the kinds of values that a schema names; none where it names none."""
    kinds, ways = set[str](), [schema]
    for way in ways:  # which grows meanwhile
        if not isinstance(way, Mapping):
            continue
        named = way.get("type")
        named = named[:MOST_WAYS] if isinstance(named, list) else [named]
        kinds.update(kind for kind in named if isinstance(kind, str))
        for key in ("anyOf", "oneOf"):
            if isinstance(more := way.get(key), list):
                ways += more[: max(0, MOST_WAYS - len(ways))]
    return kinds
