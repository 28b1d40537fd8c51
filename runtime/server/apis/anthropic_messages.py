"""`/v1/messages` and `/v1/messages/count_tokens`, as Anthropic has them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.output import Delta
from edge_run.runtime.formats.tools import AUTO, NONE, REQUIRED, Chosen, FunctionTool, Toolbox
from edge_run.runtime.server.answers import AnswerForm, AnswerResponse, event, json_response
from edge_run.runtime.server.apis.openai_messages import MOST_MESSAGES, joined, left_out
from edge_run.runtime.server.bodies import convert
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.chat_task import ChatTask, count
from edge_run.runtime.server.generating import FinishedAnswer, Job
from edge_run.runtime.server.refusals import REQUEST_ID, Refusal, anthropic_error
from edge_run.runtime.server.sampling_fields import (
    MOST_STOPS,
    Count,
    Name,
    Share,
    Stop,
    Temperature,
    ToolName,
    sampling_of,
    schema_text,
    unsupported,
)
from edge_run.runtime.server.service import Service

_LEFT_OUT = ("redacted_thinking",)
_BILLING, _STAMP = "x-anthropic-billing-header:", "cch="  # of Claude Code's


class Block(msgspec.Struct):
    """A part of a message: text, a thought, a call, or the result of one."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: Name = ""
    name: Name = ""
    input: dict[str, Any] | None = None
    tool_use_id: Name = ""
    content: str | list[Any] | None = None


_Placed = tuple[str, Block]  # where it is in the request, and the block


class AnthropicMessage(msgspec.Struct):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct):
    """A tool that may be called. type: absent, or `custom`; others are tools of Anthropic's own."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: Name = ""
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct):
    """Whether the model thinks first."""

    type: Literal["enabled", "disabled", "adaptive"] = "disabled"


class OutputFormat(msgspec.Struct):
    """A JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """What form the answer has."""

    format: OutputFormat | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """A conversation."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MOST_MESSAGES)]
    model: Name | None = None
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_salt: Name | None = None

    def task(self) -> ChatTask:
        """Return what is to be answered. Raises Refusal. May take its time."""
        messages: list[dict[str, Any]] = []
        if system := joined(map(_without_stamp, _texts(self.system or "", "system"))):
            messages.append({"role": "system", "content": system})
        for role, blocks in _turns(self.messages):
            messages += _template_messages(role, blocks)
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        return ChatTask(messages, self._toolbox(), {"enable_thinking": thinks}, salt=self.cache_salt)

    def _toolbox(self) -> Toolbox:
        for index, tool in enumerate(self.tools or ()):
            if tool.type not in (None, "custom"):
                raise unsupported(f"tools[{index}].type", f"{tool.type!r} is a tool of Anthropic's own")
        tools = [FunctionTool(tool.name, tool.description, tool.input_schema) for tool in self.tools or ()]
        choice = self.tool_choice or ToolChoice()
        choices: dict[str, str | Chosen] = {"any": REQUIRED, "tool": Chosen(choice.name), "none": NONE}
        return Toolbox(tools, choices.get(choice.type, AUTO), not choice.disable_parallel_tool_use)


class MessagesRequest(CountRequest, kw_only=True):
    """A conversation to be answered. What is not named here is ignored."""

    max_tokens: Count
    stream: bool = False
    stop_sequences: Annotated[list[Stop], Meta(max_length=MOST_STOPS)] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    output_config: OutputConfig | None = None

    def sampling(self, defaults: SamplingConfig) -> SamplingConfig:
        """Return how tokens are chosen."""
        form = self.output_config.format if self.output_config else None
        return sampling_of(
            defaults,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            json_schema=schema_text(form.schema, "output_config.format.schema") if form else None,
        )


async def messages(service: Service, request: Request) -> AnswerResponse:
    """Answer a conversation."""
    asked = await service.read(request, MessagesRequest)
    entry, sampling = service.catalogue.asked(asked.model), asked.sampling(service.defaults.sampling)

    async def make_job(served: ServedModel) -> Job:
        task = await served.prepare(asked.task)
        return await task.job(served, sampling, asked.max_tokens)

    form = MessageForm(entry.name, request.scope.get(REQUEST_ID))
    return AnswerResponse(service, entry, make_job, form, asked.stream)


async def count_tokens(service: Service, request: Request) -> Response:
    """Return how many tokens a conversation has."""
    asked = await service.read(request, CountRequest)
    async with service.visit(service.catalogue.asked(asked.model), request) as served:
        return json_response({"input_tokens": await count(served, asked.task)})


def _turns(messages: Sequence[AnthropicMessage]) -> list[tuple[str, list[_Placed]]]:
    """Return the role and the blocks of each turn: messages of one role in a row are one."""
    turns: list[tuple[str, list[_Placed]]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}].content"
        if isinstance(message.content, str):
            blocks = [(where, Block("text", message.content))]
        else:
            blocks = [(f"{where}[{number}]", block) for number, block in enumerate(message.content)]
        if turns and turns[-1][0] == message.role != "system" and not _begins_anew(turns[-1][1], blocks):
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, blocks))
    return turns


def _begins_anew(before: Sequence[_Placed], blocks: Sequence[_Placed]) -> bool:
    """Return whether `blocks` begin an answer after the calls of the one before."""
    has_calls = any(block.type == "tool_use" for _, block in before)
    return has_calls and all(block.type == "text" for _, block in blocks)


def _template_messages(role: str, blocks: Sequence[_Placed]) -> list[dict[str, Any]]:
    """Return a turn as templates know it: results of tools are messages of their own, before what the user says.

    What is no text is left out behind such a result: programs send there what a tool read, as the pages of a file.
    """
    texts: list[str] = []
    thoughts: list[str] = []
    made: dict[str, Any] = {"role": role}
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for place, block in blocks:
        if block.type == "tool_use":
            function = {"name": block.name, "arguments": block.input or {}}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "tool_result":
            text = joined(_texts(block.content or "", f"{place}.content", _tool_text))
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type not in _LEFT_OUT:
            texts.append((_tool_text if results else _text)(block, place))
    made["content"] = joined(texts)
    if thoughts:
        made["reasoning_content"] = joined(thoughts)
    if calls:
        made["tool_calls"] = calls
    return [*results, *([made] if texts or calls or not results else [])]


def _without_stamp(text: str) -> str:
    """Return a text of the system without the stamp that is another one in each request, so that they begin alike."""
    header, mark, rest = text.partition(_STAMP)
    stamp, end, more = rest.partition(";")
    if not (header.startswith(_BILLING) and stamp.isalnum()):
        return text
    return f"{header}{mark}{'0' * len(stamp)}{end}{more}"


def _text(block: Block, where: str) -> str:
    if block.type != "text":
        raise unsupported(f"{where}.type", f"{block.type[:40]!r} is not taken: this server reads text only")
    if block.text is None:
        raise Refusal(400, f"{where}.text: is missing", param=f"{where}.text")
    return block.text


def _tool_text(block: Block, where: str) -> str:
    return _text(block, where) if block.type == "text" else left_out(block.type)


def _texts(content: str | list[Any], where: str, text: Callable[[Block, str], str] = _text) -> list[str]:
    """Return the texts of a content. text: returns that of a block, given where it is."""
    if isinstance(content, str):
        return [content]
    places = [f"{where}[{index}]" for index in range(len(content))]
    blocks = [
        block if isinstance(block, Block) else convert(block, Block, place)
        for block, place in zip(content, places, strict=True)
    ]
    return [text(block, place) for block, place in zip(blocks, places, strict=True)]


class MessageForm(AnswerForm):
    """Messages and the events of their streams: one block after the other, each begun and ended."""

    prompt_param = "messages"

    def __init__(self, name: str, request_id: str | None = None) -> None:
        self._name, self._request_id = name, request_id
        self._id = f"msg_{uuid.uuid4().hex}"
        self._n_blocks, self._block = 0, ""

    def begin(self, served: ServedModel, job: Job) -> bytes:
        """Return the message that will be filled."""
        usage = {"input_tokens": len(job.tokens), "output_tokens": 0}
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message) + _event("ping")

    def piece(self, number: int, delta: Delta) -> bytes:
        """Return what a block goes on by."""
        if delta.call:
            start = {"type": "tool_use", "id": delta.call.id, "name": delta.call.name, "input": {}}
            change = {"type": "input_json_delta", "partial_json": delta.call.arguments}
            return self._close() + self._open("tool_use", start) + self._change(change) + self._close()
        if delta.reasoning:
            opening = self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return opening + self._change({"type": "thinking_delta", "thinking": delta.reasoning})
        if not delta.content:
            return b""
        opening = self._open("text", {"type": "text", "text": ""})
        return opening + self._change({"type": "text_delta", "text": delta.content})

    def end(self, outcomes: Sequence[FinishedAnswer]) -> bytes:
        """Return why it ended, and what it took."""
        ending = {"stop_reason": _stop_reason(outcomes[0]), "stop_sequence": outcomes[0].generation.stop_text or None}
        usage = _usage(outcomes[0])
        return self._close() + _event("message_delta", delta=ending, usage=usage) + _event("message_stop")

    def failed(self, refusal: Refusal) -> bytes:
        """Return the error, which is the end of the stream."""
        return event(anthropic_error(refusal, self._request_id), "error")

    def silence(self) -> bytes:
        """Return a ping, which may come before all else: clients leave a stream that has no event for minutes."""
        return _event("ping")

    def whole(self, outcomes: Sequence[FinishedAnswer]) -> bytes:
        """Return the message."""
        (outcome,) = outcomes
        content: list[dict[str, Any]] = []
        if outcome.reasoning:
            content.append({"type": "thinking", "thinking": outcome.reasoning, "signature": ""})
        if outcome.content or not outcome.calls:
            content.append({"type": "text", "text": outcome.content})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.parsed} for call in outcome.calls
        ]
        ending = {"stop_reason": _stop_reason(outcome), "stop_sequence": outcome.generation.stop_text or None}
        return msgspec.json.encode({**self._head(), "content": content, **ending, "usage": _usage(outcome)})

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._name}

    def _open(self, kind: str, start: dict[str, Any]) -> bytes:
        """Begin a block, unless one of its kind is open."""
        if self._block == kind:
            return b""
        closing, self._block = self._close(), kind
        return closing + _event("content_block_start", index=self._n_blocks, content_block=start)

    def _change(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._n_blocks, delta=delta)

    def _close(self) -> bytes:
        """End the block that is open."""
        if not self._block:
            return b""
        closing = _event("content_block_stop", index=self._n_blocks)
        self._block = ""
        self._n_blocks += 1
        return closing


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _stop_reason(outcome: FinishedAnswer) -> str:
    if outcome.finish == "stop" and outcome.generation.stop_text:
        return "stop_sequence"
    if outcome.generation.finish_reason == "context":
        return "model_context_window_exceeded"
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(outcome.finish, "end_turn")


def _usage(outcome: FinishedAnswer) -> dict[str, Any]:
    generation = outcome.generation
    return {
        "input_tokens": generation.prompt_tokens - generation.cached_tokens,
        "cache_read_input_tokens": generation.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": generation.completion_tokens,
    }
