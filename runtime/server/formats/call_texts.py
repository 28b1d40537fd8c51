"""Calls of functions as the makers of models have them written: JSON, lists of it, or a name before its arguments."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from edge_run.base import strict_json

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAMED = re.compile(rf"([\w.-]{{1,128}})\s*(?:{re.escape(CALL_ID)}\w{{1,64}}\s*)?(?:{re.escape(ARGS)})?\s*(?=\{{)")
_DECODER = json.JSONDecoder()
_BETWEEN = " \t\r\n;,"


def new_call_identity() -> str:
    """Return a name for a call that no other call has."""
    return f"call_{secrets.token_hex(12)}"


def dumped(value: Any) -> str:
    """Return JSON as models write it."""
    return json.dumps(value, ensure_ascii=False)


def called(value: Mapping[str, Any], tools: Collection[str]) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON, of a call that is a JSON object; None where it is none."""
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        return None
    return name, dumped(arguments)


def read_calls(text: str, tools: Collection[str]) -> list[tuple[str, str]] | None:
    """Return the calls in a text that holds nothing else; None where it holds something else, or a tool that is none.

    {"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}
    [{"name": "add", "arguments": {"a": 1}}]
    add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}
    """
    found: list[tuple[str, str]] = []
    rest = text.strip(_BETWEEN)
    while rest:
        rest = rest.removeprefix(CALLS).lstrip(_BETWEEN)
        named = _NAMED.match(rest)
        start = named.end() if named else 0
        try:
            _, end = _DECODER.raw_decode(rest, start)
            value = strict_json.parse(rest[start:end])
        except (ValueError, RecursionError):
            return None
        values = [{"name": named[1], "arguments": value}] if named else value if isinstance(value, list) else [value]
        calls = [called(one, tools) if isinstance(one, dict) else None for one in values]
        if None in calls or not calls:
            return None
        found += [call for call in calls if call]
        rest = rest[end:].lstrip(_BETWEEN)
    return found or None
