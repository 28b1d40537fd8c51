"""`/v1/responses`, as OpenAI has it, without what would have to be kept: each request brings its conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.tools import AUTO, Chosen, FunctionTool, Toolbox
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

MOST_DESCRIPTION_LETTERS = 1024  # of a format that are given back

Metadata = Annotated[  # as OpenAI bounds it
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class Item(msgspec.Struct):
    """A message, a thought, a call, or the result of one."""

    type: str = "message"
    role: str = ""
    content: str | list[ContentPart] | None = None
    call_id: Name = ""
    name: Name = ""
    arguments: str = "{}"
    output: str | list[ContentPart] | None = None


class FlatTool(msgspec.Struct):
    """A tool that may be called: a function, or one of OpenAI's own, which is refused."""

    type: str
    name: ToolName = "unnamed"
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FlatChoice(msgspec.Struct):
    """The tool that must be called."""

    type: Literal["function"]
    name: ToolName


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

    def _toolbox(self) -> Toolbox:
        for index, tool in enumerate(self.tools or ()):
            if tool.type != "function":
                raise unsupported(f"tools[{index}].type", f"{tool.type[:40]!r} is a tool of OpenAI's own")
        tools = [FunctionTool(tool.name, tool.description, tool.parameters) for tool in self.tools or ()]
        choice = Chosen(self.tool_choice.name) if isinstance(self.tool_choice, FlatChoice) else self.tool_choice
        return Toolbox(tools, choice or AUTO, self.parallel_tool_calls is not False)


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
        "tools": asked.tools or [],
        "text": {"format": asked.form},
        "truncation": asked.truncation or "disabled",
    }

    async def make_job(served: ServedModel) -> Job:
        task = await served.prepare(asked.task)
        return await task.job(served, sampling, asked.max_output_tokens)

    return AnswerResponse(service, entry, make_job, ResponseForm(entry.name, told), bool(asked.stream))


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
        call = {"function": {"name": item.name, "arguments": item.arguments}, "id": item.call_id}
        made = template_message(msgspec.convert({"role": "assistant", "tool_calls": [call]}, ChatMessage), where)
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).extend(made["tool_calls"])
        else:
            messages.append(made)
    elif item.type == "function_call_output":
        messages.append(template_message(ChatMessage("tool", item.output, tool_call_id=item.call_id), where))
    else:
        raise unsupported(f"{where}.type", f"{item.type[:40]!r} is not taken")
