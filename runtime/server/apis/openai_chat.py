"""`/v1/chat/completions`, as OpenAI and llama-server have it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.output import Delta
from edge_run.runtime.formats.tools import AUTO, Chosen, FunctionTool, Toolbox
from edge_run.runtime.server.answers import AnswerForm, AnswerResponse, event, json_response
from edge_run.runtime.server.apis.openai_messages import (
    MOST_WORD_LETTERS,
    Messages,
    effort_variables,
    template_messages,
)
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.chat_task import ChatTask, count
from edge_run.runtime.server.generating import FinishedAnswer, Job
from edge_run.runtime.server.logprobs import Spell, chat_logprobs
from edge_run.runtime.server.refusals import Refusal, openai_error
from edge_run.runtime.server.sampling_fields import (
    MOST_CHOICES,
    Count,
    FormedFields,
    Name,
    ToolName,
    TopLogprobs,
    first_given,
    refuse_set,
    unsupported,
)
from edge_run.runtime.server.service import Service
from edge_run.runtime.server.usage import openai_usage, timings

DONE = b"data: [DONE]\n\n"
TEMPLATE_VARIABLES: Mapping[str, type | tuple[type, ...]] = {
    "enable_thinking": bool,
    "thinking": bool,
    "reasoning_effort": str,
}

Choices = Annotated[int, Meta(ge=1, le=MOST_CHOICES)]


class StreamOptions(msgspec.Struct):
    """What a stream says besides."""

    include_usage: bool = False


class NamedFunction(msgspec.Struct):
    """A function that may be called."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolEntry(msgspec.Struct):
    """A tool that may be called."""

    function: NamedFunction
    type: Literal["function"] = "function"

    def tool(self) -> FunctionTool:
        """Return it as a toolbox has it."""
        return FunctionTool(self.function.name, self.function.description, self.function.parameters)


class ChosenTool(msgspec.Struct):
    """The tool that must be called."""

    function: Chosen
    type: Literal["function"] = "function"


class ChatRequest(FormedFields, kw_only=True):
    """A conversation to be answered. What is not named here is ignored; what is and cannot be served is refused."""

    messages: Messages
    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    reasoning_effort: Name | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolEntry] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_format: Name | None = None
    cache_salt: Name | None = None
    return_progress: bool = False
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    modalities: list[str] | None = None
    audio: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    web_search_options: Any = None

    def check(self) -> None:
        """Raise Refusal for what cannot be served."""
        refuse_set(self, "audio", "functions", "function_call", "web_search_options")
        if set(self.modalities or ()) - {"text"}:
            raise unsupported("modalities", "only text is written here")
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")

    def sampling(self, defaults: SamplingConfig) -> SamplingConfig:
        """Return how tokens are chosen. Raises Refusal."""
        top_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling_with(defaults, self.schema(), top_logprobs)

    def variables(self) -> dict[str, Any]:
        """Return what the template is told besides the messages. Raises Refusal for what no template is told."""
        told = {name: value for name, value in (self.chat_template_kwargs or {}).items() if value is not None}
        for name, value in told.items():
            kind = TEMPLATE_VARIABLES.get(name)
            place = f"chat_template_kwargs.{name[:40]}"
            if kind is None:
                raise unsupported(place, f"templates are told {', '.join(TEMPLATE_VARIABLES)} only")
            if not isinstance(value, kind) or (isinstance(value, str) and len(value) > MOST_WORD_LETTERS):
                raise Refusal(400, f"{place}: must be {'true or false' if kind is bool else 'a word'}", param=place)
        return {**effort_variables(self.reasoning_effort), **told} if self.reasoning_effort else told

    def toolbox(self) -> Toolbox:
        """Return what the answer may call."""
        choice = self.tool_choice.function if isinstance(self.tool_choice, ChosenTool) else self.tool_choice
        tools = [entry.tool() for entry in self.tools or ()]
        return Toolbox(tools, choice or AUTO, self.parallel_tool_calls is not False)

    def task(self) -> ChatTask:
        """Return what is to be answered. Raises Refusal. May take its time."""
        has_thoughts = self.reasoning_format != "none"
        messages = template_messages(self.messages)
        return ChatTask(messages, self.toolbox(), self.variables(), has_thoughts, salt=self.cache_salt)


async def chat_completions(service: Service, request: Request) -> AnswerResponse:
    """Answer a conversation."""
    asked = await service.read(request, ChatRequest)
    asked.check()
    entry, sampling = service.catalogue.asked(asked.model), asked.sampling(service.defaults.sampling)
    make_job = partial(chat_job, asked, sampling)
    return AnswerResponse(service, entry, make_job, ChatForm(entry.name, asked), bool(asked.stream))


async def count_chat(service: Service, request: Request) -> Response:
    """Return how many tokens a conversation has."""
    asked = await service.read(request, ChatRequest)
    async with service.visit(service.catalogue.asked(asked.model), request) as served:
        return json_response({"object": "response.input_tokens", "input_tokens": await count(served, asked.task)})


async def chat_job(asked: ChatRequest, sampling: SamplingConfig, served: ServedModel) -> Job:
    """Return what is to be generated for a request that was checked. Raises Refusal, and errors of ours."""
    most = first_given(asked.max_completion_tokens, asked.max_tokens)
    task = await served.prepare(asked.task)
    return await task.job(served, sampling, most, asked.n or 1)


class ChatForm(AnswerForm):
    """Chat completions and their chunks."""

    prompt_param = "messages"

    def __init__(self, name: str, asked: ChatRequest) -> None:
        self._choices, self.wants_progress = asked.n or 1, asked.return_progress
        self._has_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        self._head: dict[str, Any] = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        self._calls = [0] * self._choices
        self._spell: Spell

    def begin(self, served: ServedModel, job: Job) -> bytes:
        """Return a chunk with the role, for each choice."""
        self._head["system_fingerprint"] = served.fingerprint
        self._spell = served.model.token_bytes
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk([_choice(number, role)]) for number in range(self._choices))

    def piece(self, number: int, delta: Delta) -> bytes:
        """Return a chunk."""
        logprobs = chat_logprobs(delta.logprobs, self._spell)
        if delta.call:
            call = {"index": self._calls[number], **delta.call.document()}
            self._calls[number] += 1
            return self._chunk([_choice(number, {"tool_calls": [call]}, logprobs=logprobs)])
        key, text = ("reasoning_content", delta.reasoning) if delta.reasoning else ("content", delta.content)
        return self._chunk([_choice(number, {key: text}, logprobs=logprobs)]) if text or logprobs else b""

    def end(self, outcomes: Sequence[FinishedAnswer]) -> bytes:
        """Return why each choice ended, the usage where it was asked for, and the end of the stream."""
        frames = [
            self._chunk([_choice(number, {}, outcome.finish)], timings=timings(outcome.generation))
            for number, outcome in enumerate(outcomes)
        ]
        if self._has_usage:
            frames.append(self._chunk([], usage=openai_usage(outcomes), timings=timings(outcomes[0].generation)))
        return b"".join(frames) + DONE

    def failed(self, refusal: Refusal) -> bytes:
        """Return the error, which is the end of the stream."""
        return event(openai_error(refusal)) + DONE

    def progress(self, number: int, said: Mapping[str, Any]) -> bytes:
        """Return a chunk of llama-server's kind."""
        return self._chunk([_choice(number, {})], prompt_progress=said)

    def whole(self, outcomes: Sequence[FinishedAnswer]) -> bytes:
        """Return a chat completion."""
        choices = [
            {
                "index": number,
                "message": _message(outcome),
                "logprobs": chat_logprobs(outcome.generation.logprobs, self._spell),
                "finish_reason": outcome.finish,
            }
            for number, outcome in enumerate(outcomes)
        ]
        rest = {"usage": openai_usage(outcomes), "timings": timings(outcomes[0].generation)}
        head = {**self._head, "object": "chat.completion"}
        return msgspec.json.encode({**head, "choices": choices, **rest})

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self._has_usage else {}
        return event({**self._head, "object": "chat.completion.chunk", "choices": choices, **usage, **more})


def _choice(
    number: int, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _message(outcome: FinishedAnswer) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": outcome.content, "refusal": None}
    if outcome.reasoning:
        made["reasoning_content"] = outcome.reasoning
    if outcome.calls:
        made["content"] = outcome.content or None
        made["tool_calls"] = [call.document() for call in outcome.calls]
    return made
