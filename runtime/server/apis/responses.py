"""`/v1/responses`, as OpenAI has it, without what would have to be kept: each request brings its conversation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.tools import AUTO, TOOL_NAME, Chosen, FunctionTool, Toolbox
from edge_run.runtime.server.answers import AnswerResponse, json_response
from edge_run.runtime.server.apis.openai_messages import (
    MOST_MESSAGES,
    ChatMessage,
    ContentPart,
    check_arguments,
    effort_variables,
    joined,
    template_message,
)
from edge_run.runtime.server.apis.responses_form import ResponseForm
from edge_run.runtime.server.bodies import convert
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.chat_task import ChatTask, count
from edge_run.runtime.server.generating import Job
from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.sampling_fields import (
    Count,
    Name,
    ResponseFormat,
    Share,
    Temperature,
    ToolName,
    refuse_set,
    sampling_of,
    unsupported,
)
from edge_run.runtime.server.service import Service

_FUNCTION, _NAMESPACE = "function", "namespace"
MOST_DESCRIPTION_LETTERS = 1024  # of a format that are given back

Metadata = Annotated[  # as OpenAI bounds it
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class Item(msgspec.Struct):
    """A message, a thought, a call, or the result of one. namespace: of the function that was called."""

    type: str = "message"
    role: str = ""
    content: str | list[ContentPart] | None = None
    call_id: Name = ""
    name: Name = ""
    namespace: Name = ""
    arguments: str = "{}"
    output: str | list[ContentPart] | None = None


class FlatTool(msgspec.Struct, omit_defaults=True):
    """A tool that may be called: a function, a namespace of some (`tools`), or one of OpenAI's own."""

    type: str
    name: ToolName = "unnamed"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: list[FlatTool] | None = None


class FlatChoice(msgspec.Struct, omit_defaults=True):
    """The function that must be called. namespace: where it is; empty: wherever one of that name is, if only one is."""

    type: Literal["function"]
    name: ToolName
    namespace: Name = ""


class TextFormat(msgspec.Struct, omit_defaults=True):
    """What form the text has, as `ResponseFormat`; the rest is given back."""

    type: Name = ""  # text, which is given back then
    schema: dict[str, Any] | None = None
    name: Name | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    """What the text is like."""

    format: TextFormat | None = None


class ReasoningOptions(msgspec.Struct):
    """How much the model thinks."""

    effort: Name | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """A conversation to be answered. What is not named here is ignored."""

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MOST_MESSAGES)]
    model: Name | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Metadata | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    cache_salt: Name | None = None

    def check(self) -> None:
        """Raise Refusal for what cannot be served."""
        refuse_set(self, "previous_response_id", "conversation", "background", "prompt", "top_logprobs")

    def task(self) -> ChatTask:
        """Return what is to be answered. Raises Refusal. May take its time."""
        messages = list[dict[str, Any]]()
        if self.instructions:
            messages.append(template_message(ChatMessage("system", self.instructions), "instructions"))
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            check_arguments((item.arguments for item in self.input), "input")
            messages += _template_messages(self.input)
        if not messages:
            raise Refusal(400, "input: has nothing that can be answered", param="input")
        if said := [one["content"] for one in takewhile(lambda one: one["role"] == "system", messages)]:
            messages[: len(said)] = [{"role": "system", "content": joined(said)}]  # gpt-oss's template takes one only
        effort = self.reasoning.effort if self.reasoning else None
        variables = effort_variables(effort) if effort else {}
        drops_oldest = self.truncation == "auto"
        return ChatTask(messages, self._toolbox(), variables, drops_oldest=drops_oldest, salt=self.cache_salt)

    def sampling(self, defaults: SamplingConfig) -> SamplingConfig:
        """Return how tokens are chosen. Raises Refusal."""
        schema = ResponseFormat(self.form.type, schema=self.form.schema).text("text.format", "schema")
        return sampling_of(defaults, temperature=self.temperature, top_p=self.top_p, json_schema=schema)

    @property
    def form(self) -> TextFormat:
        """What form the text has."""
        given = self.text.format if self.text else None
        if not given or given.type in ("", "text"):
            return TextFormat("text")
        return msgspec.structs.replace(given, description=(given.description or "")[:MOST_DESCRIPTION_LETTERS] or None)

    @property
    def known_tools(self) -> Sequence[FlatTool]:
        """The tools less those of OpenAI's own: Codex brings some beside its functions, and can do without them."""
        known = [tool for tool in self.tools or () if tool.type in (_FUNCTION, _NAMESPACE)]
        return [_without_others(tool) if tool.type == _NAMESPACE else tool for tool in known]

    def functions(self) -> list[tuple[str, FlatTool]]:
        """Return the functions that may be called, each with its namespace, empty for none.

        Raises Refusal where none is there, but tools of OpenAI's own are: an answer without what was asked for would
        look like one with.
        """
        found = list[tuple[str, FlatTool]]()
        for tool in self.known_tools:
            if tool.type == _FUNCTION:
                found.append(("", tool))
            else:
                found += [(tool.name, one) for one in tool.tools or ()]
        if not found and (own := next(_own_tools(self.tools or ()), None)):
            where, kind = own
            raise unsupported(where, f"{kind[:40]!r} is a tool of OpenAI's own")
        return found

    def _toolbox(self) -> Toolbox:
        tools, places = list[FunctionTool](), dict[str, tuple[str, str]]()
        for namespace, one in self.functions():
            name, place = _full_name(namespace, one.name), (namespace, one.name)
            if places.setdefault(name, place) != place:
                both = " and ".join(
                    f"{one!r} of {where!r}" if where else repr(one) for where, one in (places[name], place)
                )
                raise Refusal(400, f"tools: {both} would both be called {name}", param="tools")
            if not re.match(TOOL_NAME, name):
                raise Refusal(400, f"tools: {name[:60]}...: is too long a name, with its namespace", param="tools")
            tools.append(FunctionTool(name, one.description, one.parameters))
        given = self.tool_choice
        choice = Chosen(_chosen_name(given, places)) if isinstance(given, FlatChoice) else given
        return Toolbox(tools, choice or AUTO, self.parallel_tool_calls is not False)


def _full_name(namespace: str, name: str) -> str:
    """Return what the model calls a function of a namespace."""
    return f"{namespace}__{name}" if namespace and not namespace.endswith("_") else f"{namespace}{name}"


def _chosen_name(choice: FlatChoice, places: Mapping[str, tuple[str, str]]) -> str:
    """Return what the model calls the function that must be called. places: namespaces and names, by full names."""
    if choice.namespace or choice.name in places:
        return _full_name(choice.namespace, choice.name)
    alike = [full for full, (_, name) in places.items() if name == choice.name]
    return alike[0] if len(alike) == 1 else choice.name


def _without_others(namespace: FlatTool) -> FlatTool:
    """Return a namespace with its functions alone."""
    return msgspec.structs.replace(namespace, tools=[one for one in namespace.tools or () if one.type == _FUNCTION])


def _own_tools(tools: Sequence[FlatTool], where: str = "tools") -> Iterator[tuple[str, str]]:
    """Yield where the tools are that are OpenAI's own, and their kinds."""
    for index, tool in enumerate(tools):
        if tool.type == _NAMESPACE:
            yield from _own_tools(tool.tools or (), f"{where}[{index}].tools")
        elif tool.type != _FUNCTION:
            yield f"{where}[{index}].type", tool.type


async def responses(service: Service, request: Request) -> AnswerResponse:
    """Answer a conversation."""
    asked = await service.read(request, ResponsesRequest)
    asked.check()
    entry, sampling = service.catalogue.asked(asked.model), asked.sampling(service.defaults.sampling)
    told = {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "tool_choice": asked.tool_choice or AUTO,
        "tools": asked.known_tools,
        "text": {"format": asked.form},
        "truncation": asked.truncation or "disabled",
    }
    form = ResponseForm(entry.name, told)

    async def make_job(served: ServedModel) -> Job:
        task = await served.prepare(asked.task)
        job = await task.job(served, sampling, asked.max_output_tokens)
        form.namespaced = {_full_name(where, one.name): (where, one.name) for where, one in asked.functions() if where}
        return job

    return AnswerResponse(service, entry, make_job, form, bool(asked.stream))


async def count_response(service: Service, request: Request) -> Response:
    """Return how many tokens a conversation has."""
    asked = await service.read(request, ResponsesRequest)
    asked.check()
    async with service.visit(service.catalogue.asked(asked.model), request) as served:
        return json_response({"object": "response.input_tokens", "input_tokens": await count(served, asked.task)})


def _template_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return a conversation as templates know it: thoughts belong to what the assistant says or calls after them."""
    messages, thoughts = list[dict[str, Any]](), list[str]()
    for index, item in enumerate(items):
        if item.type == "reasoning":
            parts = item.content if isinstance(item.content, list) else []
            thoughts += [part.text for part in parts if part.type == "reasoning_text" and part.text]
            continue
        _add(messages, item, f"input[{index}]")
        if thoughts and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("reasoning_content", []).extend(thoughts)
        thoughts.clear()
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = joined(message["reasoning_content"])
    return messages


def _add(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    """Add an item to a conversation; calls in a row are one message."""
    if item.type == "message":
        messages.append(template_message(ChatMessage(item.role, item.content), where))
    elif item.type == "function_call":
        name = _full_name(item.namespace, item.name)
        call = {"function": {"name": name, "arguments": item.arguments}, "id": item.call_id}
        made = template_message(convert({"role": "assistant", "tool_calls": [call]}, ChatMessage, where), where)
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).extend(made["tool_calls"])
        else:
            messages.append(made)
    elif item.type == "function_call_output":
        messages.append(template_message(ChatMessage("tool", item.output, tool_call_id=item.call_id), where))
    else:
        raise unsupported(f"{where}.type", f"{item.type[:40]!r} is not taken")
