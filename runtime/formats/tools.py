"""Tools that a model may call: how it is told of them, and how it is made to call one."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_run.base.errors import ConfigError
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.bounded_json import bounded_json
from edge_run.runtime.formats.call_texts import dumped
from edge_run.runtime.formats.marked_output import CALL, CALLED
from edge_run.runtime.formats.tool_format import ToolFormat

MOST_TOOLS = 128
MOST_TOOLS_LETTERS = 1 << 19  # some editors bring 60,000
NONE, AUTO, REQUIRED = "none", "auto", "required"
TOOL_NAME = r"^[a-zA-Z0-9_.-]{1,128}\Z"  # `$` would allow a line break
_FORM = '{"type": "function", "function": {"name": "...", "description": "...", "parameters": {...}}}'
_CHOSEN = '{"type": "function", "function": {"name": "..."}}'

_HOW = (
    "You may call functions. They are listed below, each a JSON object with its name, description and parameters (a "
    f"JSON schema). To call one, write {CALL} on a line, on the next a JSON object with its name and its arguments, as "
    f'{{"name": "...", "arguments": {{...}}}}, and {CALLED} on the line after. The results come in the next message. '
    "Call a function only where it helps; else answer in words."
)


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function that may be called. name: as of TOOL_NAME. parameters: a JSON schema of its arguments, an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return self.parameters or {"type": "object", "properties": {}}

    def document(self) -> dict[str, Any]:
        """Return the function as templates know it."""
        function = {"name": self.name, "description": self.description or "", "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Chosen:
    """The choice of the tool that must be called, by its name, which may be a word such as `auto`."""

    name: str


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What may be called. choice: `none`, `auto`, `required`, or the tool that must be called."""

    tools: Sequence[FunctionTool] = ()
    choice: str | Chosen = AUTO
    is_parallel: bool = True

    @classmethod
    def of(cls, tools: Sequence[object], choice: str | Mapping[str, Any] = AUTO) -> Toolbox:
        """Return the toolbox of tools and a choice as OpenAI's clients write them. Raises ConfigError, as `check`."""
        made = cls([_function_tool(f"tools[{number}]", tool) for number, tool in enumerate(tools)], _choice(choice))
        made.check()
        return made

    def check(self) -> None:
        """Raise ConfigError for tools that are too many, too large or of one name, and a choice that is none of them.

        It begins with what is wrong, `tools` or `tool_choice`, and a colon.
        """
        if len(self.tools) > MOST_TOOLS:
            raise ConfigError(f"tools: {len(self.tools)} tools, {MOST_TOOLS} are the most")
        if len({tool.name for tool in self.tools}) < len(self.tools):
            raise ConfigError("tools: two tools of one name")
        bounded_json({"tools": [tool.document() for tool in self.tools]}, "tools", MOST_TOOLS_LETTERS)
        if self.choice not in (NONE, AUTO) and not self.callable:
            raise ConfigError("tool_choice: names none of the tools")

    def check_form(self, asked: SamplingConfig) -> None:
        """Raise ConfigError where an answer cannot have the form that is asked for as well."""
        if self.is_forced and (asked.grammar or asked.json_schema):
            raise ConfigError("tool_choice: a call that must be made has a form already")
        if self.callable and asked.grammar:
            raise ConfigError(
                "grammar: the answer could call no tool; leave out one of the two, or say tool_choice none"
            )

    @property
    def callable(self) -> Sequence[FunctionTool]:
        """The tools that this answer may call."""
        if isinstance(self.choice, Chosen):
            return [tool for tool in self.tools if tool.name == self.choice.name]
        return () if self.choice == NONE else self.tools

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return bool(self.tools) and self.choice not in (NONE, AUTO)

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The JSON schemas of the arguments of the tools that this answer may call, by their names."""
        return {tool.name: tool.schema for tool in self.callable}

    def forced_schema(self, form: ToolFormat) -> str:
        """Return the JSON schema, as text, of a call of one of the tools. Raises ConfigError for a long one."""
        try:
            return bounded_json(form.schema([*self.schemas.items()]), "tools")
        except RecursionError:
            raise ConfigError("tools: a schema of parameters is nested too deep") from None

    def call_or_schema(self, form: ToolFormat, schema: str) -> str:
        """Return what, as text, lets an answer be a call or follow a schema.

        A call that need not be made has any object as its arguments, as one has without a schema: functions of others
        say much that no grammar can. Raises ConfigError for what is not JSON.
        """
        calls = [(name, {"type": "object"}) for name in self.schemas]
        try:
            asked = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"JSON schema: {error}") from error
        return json.dumps(form.call_or_schema(calls, asked))

    def told(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a conversation for a template that knows no tools: what it would say of them is in the texts.

        What calls gave is the user's word, as one message with what comes before and behind it: many such templates
        want the user and the assistant to take turns.
        """
        told = _joined(map(_as_text, messages))
        if not self.tools:
            return told
        how = "\n".join([_HOW, *(dumped(tool.document()["function"]) for tool in self.tools)])
        if told and told[0]["role"] == "system":
            return [{**told[0], "content": f"{told[0]['content']}\n\n{how}"}, *told[1:]]
        return [{"role": "system", "content": how}, *told]


def _joined(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages, those of the user that follow each other as one."""
    joined = list[dict[str, Any]]()
    for is_user, group in itertools.groupby(messages, lambda message: message["role"] == "user"):
        if is_user:
            first, *others = group
            content = "\n".join(message["content"] for message in (first, *others))
            joined.append({**first, "content": content})
        else:
            joined += group
    return joined


def _choice(given: str | Mapping[str, Any]) -> str | Chosen:
    if isinstance(given, str) and given in (NONE, AUTO, REQUIRED):
        return given
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"tool_choice: must be none, auto, required, or {_CHOSEN}")
    return Chosen(function["name"])


def _function_tool(where: str, tool: object) -> FunctionTool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{where}: must be as {_FORM}")
    name, description, parameters = function["name"], function.get("description"), function.get("parameters")
    if not re.match(TOOL_NAME, name):
        raise ConfigError(f"{where}.function.name: {name!r:.60} must be 1 to 128 letters, digits, _, . and -")
    if not isinstance(description, str | None) or not isinstance(parameters, Mapping | None):
        raise ConfigError(f"{where}.function: description must be text, parameters a JSON schema")
    if parameters is not None:  # a copy, as the caller may change his own while the request waits
        parameters = json.loads(bounded_json(dict(parameters), "tools", MOST_TOOLS_LETTERS))
    return FunctionTool(name, description, parameters)


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [f"{CALL}\n{dumped(call['function'])}\n{CALLED}" for call in message["tool_calls"]]
    return {"role": message["role"], "content": "\n".join([message["content"], *calls]).strip()}
