"""In which format a model writes: found by what its chat template knows, and what a forced call needs in it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from edge_run.runtime.formats import harmony
from edge_run.runtime.formats.call_texts import ARGS, CALL_ID, CALLS
from edge_run.runtime.formats.harmony import HarmonyOutput
from edge_run.runtime.formats.marked_output import CALL, THINK, MarkedOutput
from edge_run.runtime.formats.output import OutputParser
from edge_run.runtime.grammars.schema_grammar import ALTERNATIVES

PYTHON_TAG = "<|python_tag|>"
_MISTRAL_ID_LETTERS = 9
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
    parser: Callable[..., OutputParser]
    is_always: bool = False
    answer_begins: str = ""

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a conversation as templates of this format want it."""
        if self.sign in (CALLS, ARGS):
            return [_with_short_identities(message) for message in messages]
        if self.is_always:
            return [_with_thinking(message) for message in messages]
        return list(messages)

    def call_or_schema(self, tools: Sequence[Tool], schema: Any) -> dict[str, Any]:
        """Return what `schema_grammar` takes for an answer that is a call of one of the tools, or follows a schema."""
        call = self.schema(tools)
        calls = call.get(ALTERNATIVES, [{"text": "", "schema": call}])
        answers = [{"text": self.answer_begins, "schema": schema}]
        return {ALTERNATIVES: [*answers, *({**way, "text": f"{self.begins}{way['text']}"} for way in calls)]}


def format_of(template: str) -> ToolFormat | None:
    """Return the format of a chat template that knows tools; None where it knows none."""
    return next((one for one in FORMATS if one.sign in template), None)


def can_think(template: str) -> bool:
    """Return whether thoughts can be told apart in the answers of a model with this chat template."""
    form = format_of(template)
    return THINK in template or (form is not None and form.is_always)


def call_schema(tools: Sequence[Tool], key: str = "arguments") -> dict[str, Any]:
    """Return the JSON schema of a call of one of the tools, an object with its name and, under `key`, its arguments.

    The arguments of each tool are a definition by its name: what they define themselves is nobody else's.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{name}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name, _ in tools
    ]
    definitions = {name: _moved(arguments, f"#/$defs/{name}") for name, arguments in tools}
    return {"$defs": definitions, **({"anyOf": calls} if len(calls) > 1 else calls[0])}


def _list_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    call = call_schema(tools)
    definitions = call.pop("$defs")
    return {"$defs": definitions, "type": "array", "items": call, "minItems": 1, "maxItems": 1}


def _named_schema(tools: Sequence[Tool], after_name: str) -> dict[str, Any]:
    """Return what `schema_grammar` takes for a name, a mark, and arguments that suit the name."""
    return {ALTERNATIVES: [{"text": f"{name}{after_name}", "schema": arguments} for name, arguments in tools]}


def _moved(schema: Any, place: str) -> Any:
    """Return a schema for a place in another one: its references lead from there, not from the root."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _moved(value, place) for key, value in schema.items()}
    if isinstance(reference := made.get("$ref"), str) and reference.startswith("#"):
        made["$ref"] = f"{place}{reference.removeprefix('#')}"
    return made


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
