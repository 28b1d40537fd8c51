"""How one model is asked with tools: what its template is told, how its answer begins, and what that means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from edge_run.base import strict_json
from edge_run.base.errors import ConfigError
from edge_run.base.options import is_list
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.bounded_json import bounded_json
from edge_run.runtime.formats.marked_output import THINK, THOUGHT
from edge_run.runtime.formats.output import MakeParser, PlainOutput
from edge_run.runtime.formats.tool_format import HERMES, ToolFormat, can_think, format_of
from edge_run.runtime.formats.tools import Toolbox

Render: TypeAlias = Callable[[Sequence[dict[str, Any]], Mapping[str, Any]], str]  # messages and variables to a text
_CALL = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
_MOST_CALLS = 1_000  # of an answer; further ones are left out
_MOST_LETTERS = 1 << 24  # of the arguments of a call, whose text is bounded by the context


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What the answer of a conversation continues, and how it is read.

    text: with what is given of the answer at its end. parser: makes what parses the answer. marks: control tokens that
    are a part of its text.
    """

    text: str
    parser: MakeParser
    marks: Sequence[str]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a model with a chat template is asked, and what its answer means.

    template: Jinja text, which says how the model writes. toolbox: what the answer may call.
    has_thoughts: whether what the model thinks is told apart from what it says.
    """

    template: str
    toolbox: Toolbox = field(default_factory=Toolbox)
    has_thoughts: bool = True

    @property
    def form(self) -> ToolFormat:
        """How the model writes calls; a template that knows no tools is told to write them as Hermes's models do."""
        return format_of(self.template) or HERMES

    def told(self, messages: Sequence[dict[str, Any]]) -> tuple[Sequence[dict[str, Any]], dict[str, Any]]:
        """Return messages, and what else there is to tell, as the template wants them. Each content is text.

        The arguments of calls are objects, as `with_arguments` makes them.
        """
        form, tools = format_of(self.template), self.toolbox.tools
        if form is not None:
            return form.messages(messages), {"tools": [tool.document() for tool in tools]} if tools else {}
        if tools or any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            return self.toolbox.told(messages), {}
        return messages, {}

    def sampling(self, asked: SamplingConfig, is_begun: bool = False) -> SamplingConfig:
        """Return how the tokens of the answer are chosen, so that it has the form that is `asked`, or is a call.

        is_begun: whether the beginning of the answer is given. Raises ConfigError where both cannot be.
        """
        toolbox, form = self.toolbox, self.form
        toolbox.check_form(asked)
        if toolbox.is_forced:
            return replace(asked, json_schema=toolbox.forced_schema(form))
        if toolbox.callable and asked.json_schema and not (is_begun and form.answer_begins):
            return replace(asked, json_schema=toolbox.call_or_schema(form, asked.json_schema_text))
        return asked

    def text(self, render: Render, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return what the template makes of a conversation, with messages as of `told`.

        render: has it do so. variables: what it is told besides.
        """
        told, more = self.told(messages)
        return render(told, {**variables, **more})

    def prompt(
        self,
        render: Render,
        messages: Sequence[dict[str, Any]],
        variables: Mapping[str, Any],
        asked: SamplingConfig,
        beginning: str = "",
    ) -> ChatPrompt:
        """Return what the answer of a conversation continues. render, messages, variables: as of `text`.

        asked: what form the answer has. beginning: what it begins with.
        """
        text, begins = self._opened(self.text(render, messages, variables), asked, beginning)
        parser = self.parser(text, begins)
        return ChatPrompt(text, parser, () if parser is PlainOutput else self.form.marks)

    def _opened(self, text: str, asked: SamplingConfig, beginning: str) -> tuple[str, str]:
        """Return the text that the answer continues, and the marks at its end that are a part of the answer."""
        form = self.form
        if beginning:
            return f"{_after_thought(text)}{form.answer_begins}{beginning}", form.answer_begins
        if self.toolbox.is_forced:
            return f"{_after_thought(text)}{form.begins}", form.begins
        if asked.json_schema:  # which no thought can be part of; a grammar may have one
            text = _after_thought(text)
            if self.toolbox.callable:
                return text, ""
        if asked.grammar or asked.json_schema:
            return f"{text}{form.answer_begins}", form.answer_begins
        return text, ""

    def parser(self, prompt: str, begins: str) -> MakeParser:
        """Return what makes a parser of an answer to a prompt, which ends with the marks `begins` of the answer."""
        begins = begins.strip()
        has_thoughts = self.has_thoughts and can_think(self.template)
        if has_thoughts and prompt.rstrip().endswith(THINK):
            begins = THINK
        tools, form = self.toolbox.schemas, self.form
        if not (tools or has_thoughts or form.is_always):
            return PlainOutput
        most = _MOST_CALLS if self.toolbox.is_parallel else 1
        return partial(form.parser, begins, has_thoughts, tools, most)


def with_arguments(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message, the one of a number, whose calls have their arguments as objects, as templates want them.

    Clients write them as text, the JSON of an object. Raises ConfigError for what is neither, and for identities that
    are no text; those that are None are left out.
    """
    where, calls = f"chat message {index}", message.get("tool_calls")
    if "tool_call_id" in message:
        given = _identity(where, "tool_call_id", message["tool_call_id"])
        message = {key: value for key, value in message.items() if key != "tool_call_id"}
        message |= {"tool_call_id": given} if given else {}
    if not calls:
        return message
    if not is_list(calls):
        raise ConfigError(f"{where}: tool_calls must be a list, found {type(calls).__name__}")
    return {**message, "tool_calls": [_call(where, call) for call in calls]}


def _identity(where: str, what: str, value: object) -> str:
    if not isinstance(value, str | None):
        raise ConfigError(f"{where}: {what} must be text, found {type(value).__name__}")
    return value or ""


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{where}: a call must be as {_CALL}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = strict_json.parse(arguments)
        except ValueError:
            raise ConfigError(f"{where}: the arguments of {function['name']} are not JSON") from None
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{where}: the arguments of {function['name']} must be an object")
    bounded_json(dict(arguments), f"{where}: the arguments of {function['name']}", _MOST_LETTERS)
    identity = _identity(where, "the id of a call", call.get("id"))
    return {"type": "function", **call, "id": identity, "function": {**function, "arguments": dict(arguments)}}


def _after_thought(prompt: str) -> str:
    """Return a prompt of which the thought has ended that its template begins, if it begins one."""
    return f"{prompt}\n{THOUGHT}\n\n" if prompt.rstrip().endswith(THINK) else prompt
