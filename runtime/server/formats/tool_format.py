"""In which format a model writes: found by what its chat template knows, and what a forced call needs in it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from edge_run.runtime.grammars.grammar import ALTERNATIVES
from edge_run.runtime.server.formats import harmony
from edge_run.runtime.server.formats.call_texts import ARGS, CALL_ID, CALLS
from edge_run.runtime.server.formats.harmony import HarmonyOutput
from edge_run.runtime.server.formats.marked_output import CALL, MarkedOutput
from edge_run.runtime.server.generating import OutputParser

PYTHON_TAG = "<|python_tag|>"
_MISTRAL_ID_LETTERS = 9
MakeParser = Callable[..., OutputParser]
Tool = tuple[str, Mapping[str, Any]]  # a name, and the JSON schema of the arguments


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    sign: what the chat template of a model that writes so has in it. marks: control tokens that are a part of the text.
    begins: what a prompt ends with whose answer must be a call. schema: the JSON schema of what follows.
    parser: makes what parses an answer; `begins` of it is what the prompt ended with.
    is_always: whether answers without tools are written so too. answer_begins: what comes before the beginning of an
    answer that a request gives.
    """

    sign: str
    marks: tuple[str, ...]
    begins: str
    schema: Callable[[Sequence[Tool]], dict[str, Any]]
    parser: MakeParser
    is_always: bool = False
    answer_begins: str = ""

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a conversation as templates of this format want it."""
        if self.sign in (CALLS, ARGS):
            return [_with_short_identities(message) for message in messages]
        if self.is_always:
            return [_with_thinking(message) for message in messages]
        return list(messages)


def format_of(template: str) -> ToolFormat | None:
    """Return the format of a chat template that knows tools; None where it knows none."""
    return next((one for one in FORMATS if one.sign in template), None)


def call_schema(tools: Sequence[Tool], key: str = "arguments") -> dict[str, Any]:
    """Return the JSON schema of a call of one of the tools, an object with its name and, under `key`, its arguments."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: arguments},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name, arguments in tools
    ]
    found: dict[str, Any] = _definitions(tools)
    return {**found, "anyOf": calls} if len(calls) > 1 else {**found, **calls[0]}


def _list_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    call = call_schema(tools)
    found: dict[str, Any] = {key: call.pop(key) for key in ("$defs", "definitions") if key in call}
    return {**found, "type": "array", "items": call, "minItems": 1, "maxItems": 1}


def _named_schema(tools: Sequence[Tool], after_name: str) -> dict[str, Any]:
    """Return what `schema_grammar` takes for a name, a mark, and arguments that suit the name."""
    return {ALTERNATIVES: [{"text": f"{name}{after_name}", "schema": arguments} for name, arguments in tools]}


def _definitions(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the definitions of all tools: references in a schema lead from its root."""
    found: dict[str, dict[str, Any]] = {}
    for _, arguments in tools:
        for key in ("$defs", "definitions"):
            found.setdefault(key, {}).update(arguments.get(key, {}))
    return {key: value for key, value in found.items() if value}


def _with_short_identities(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have identities of nine letters and digits: Mistral's templates refuse others."""
    made = dict(message)
    if message.get("tool_calls"):
        made["tool_calls"] = [{**call, "id": _short(call.get("id", ""))} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        made["tool_call_id"] = _short(message["tool_call_id"])
    return made


def _short(identity: str) -> str:
    if len(identity) == _MISTRAL_ID_LETTERS and identity.isalnum():
        return identity
    return hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:_MISTRAL_ID_LETTERS]


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose reasoning is where gpt-oss's template looks for it: before a call only."""
    made = dict(message)
    reasoning = made.pop("reasoning_content", "")
    if reasoning and made.get("tool_calls") and not made.get("content"):
        made["thinking"] = reasoning
    return made


HERMES = ToolFormat(CALL, (), f"{CALL}\n", call_schema, MarkedOutput)
FORMATS = (
    ToolFormat(
        harmony.CHANNEL,
        harmony.MARKS,
        f"{harmony.CHANNEL}commentary to=functions.",
        partial(_named_schema, after_name=f" {harmony.CONSTRAIN}json{harmony.MESSAGE}"),
        HarmonyOutput,
        is_always=True,
        answer_begins=f"{harmony.CHANNEL}final{harmony.MESSAGE}",
    ),
    HERMES,
    ToolFormat(
        ARGS,
        (CALLS, ARGS, CALL_ID),
        CALLS,
        partial(_named_schema, after_name=ARGS),
        partial(MarkedOutput, marks=(CALLS, "")),
    ),
    ToolFormat(CALLS, (CALLS,), CALLS, _list_schema, partial(MarkedOutput, marks=(CALLS, ""))),
    ToolFormat(
        PYTHON_TAG,
        (PYTHON_TAG,),
        "",
        partial(call_schema, key="parameters"),
        partial(MarkedOutput, marks=(PYTHON_TAG, "")),
    ),
)
