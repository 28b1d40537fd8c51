"""Conversations as OpenAI's clients write them, turned into what chat templates know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from edge_run.base import strict_json
from edge_run.runtime.generation.chat import TEXT_PARTS, template_role, text_of_parts
from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.sampling_fields import Name, unsupported

MOST_MESSAGES = 10_000
MOST_WORD_LETTERS = 32  # that a template is told
_ROLES = ("system", "developer", "user", "assistant", "tool")


class ContentPart(msgspec.Struct):
    """A part of a message: text, or something that is refused."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct):
    """Which function was called. arguments: as JSON text, or as some clients write them, an object."""

    name: Name
    arguments: str | dict[str, Any] = "{}"


class MadeCall(msgspec.Struct):
    """A call that an earlier answer made."""

    function: CalledFunction
    id: Name = ""
    type: str = "function"


class ChatMessage(msgspec.Struct):
    """A message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: Name | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MOST_MESSAGES)]


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages as templates know them. Raises Refusal that names what is wrong. May take its time."""
    check_arguments(
        (call.function.arguments for message in messages for call in message.tool_calls or ()), "messages.tool_calls"
    )
    return [template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    """Return one whose calls' arguments were checked. Raises Refusal."""
    if message.role not in _ROLES:
        raise Refusal(400, f"{where}.role: must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    content = message.content
    if isinstance(content, list):
        parts = [*map(_tool_part, content)] if message.role == "tool" else content
        content = text_of_parts([*map(msgspec.structs.asdict, parts)], partial(_no_text, parts, where))
    if content is None and not (message.tool_calls or message.role == "assistant"):
        raise Refusal(400, f"{where}.content: is missing", param=f"{where}.content")
    made: dict[str, Any] = {"role": template_role(message.role), "content": content or ""}
    if message.tool_calls:
        made["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if value := getattr(message, name):
            made[name] = value
    return made


def left_out(kind: str) -> str:
    """Return what a model is told in place of what a tool gave that is no text, such as a picture.

    Refused, it would end the conversation: a program sends it again with each request, and no user can take it back.
    """
    return f"[{kind.removeprefix('input_').removesuffix('_url')[:40]} left out: this model reads text only]"


def _tool_part(part: ContentPart) -> ContentPart:
    return part if part.type in TEXT_PARTS else ContentPart("text", left_out(part.type))


def _no_text(parts: Sequence[ContentPart], where: str, number: int) -> Refusal:
    place, kind = f"{where}.content[{number}]", parts[number].type
    if kind in TEXT_PARTS:
        return Refusal(400, f"{place}.text: is missing", param=f"{place}.text")
    return unsupported(f"{place}.type", f"{kind[:40]!r} is not taken: only text is read here")


def _call(call: MadeCall, where: str) -> dict[str, Any]:
    """Return a call with its arguments as an object, which templates write as they please."""
    place, arguments = f"{where}.function.arguments", call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = strict_json.parse(arguments or "{}")
        except ValueError:
            raise Refusal(400, f"{place}: is not JSON", param=place) from None
    if not isinstance(arguments, dict):
        raise Refusal(400, f"{place}: must be an object", param=place)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def check_arguments(arguments: Iterable[str | dict[str, Any]], param: str) -> None:
    """Raise Refusal where the arguments of a conversation's calls have more lists and objects than one document may.

    Those that are texts of the request's document: nobody has counted there what is in them.
    """
    n_containers = strict_json.containers(*(one for one in arguments if isinstance(one, str)))
    if n_containers > strict_json.MOST_CONTAINERS:
        message = f"{n_containers:,} lists and objects in arguments, {strict_json.MOST_CONTAINERS:,} are the most"
        raise Refusal(400, f"{param}: {message}", param=param)


def effort_variables(effort: str) -> dict[str, Any]:
    """Return what templates are told of how much OpenAI's clients want the model to think: `none` is not at all."""
    return {"reasoning_effort": effort[:MOST_WORD_LETTERS], "enable_thinking": effort != "none"}


def joined(texts: Iterable[str]) -> str:
    """Return several texts as one, a paragraph each."""
    return "\n\n".join(text for text in texts if text)
