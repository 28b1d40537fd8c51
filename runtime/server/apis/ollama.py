"""`/api/chat`, `/api/generate` and what Ollama's clients ask besides, as Ollama has them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from edge_run.base.results import ToolCall
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.output import Delta
from edge_run.runtime.formats.tool_format import can_think
from edge_run.runtime.formats.tools import Toolbox
from edge_run.runtime.server.answers import JSON_LINES, AnswerForm, AnswerResponse, json_response, one_line
from edge_run.runtime.server.apis.gaps import gap_tokens
from edge_run.runtime.server.apis.keep_alive import KeepAlive, rest_s
from edge_run.runtime.server.apis.openai_chat import ToolEntry
from edge_run.runtime.server.apis.openai_messages import MOST_MESSAGES, joined, left_out
from edge_run.runtime.server.catalogue.folder import ModelEntry
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.chat_task import ChatTask
from edge_run.runtime.server.generating import FinishedAnswer, Job
from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.sampling_fields import (
    Name,
    SamplingFields,
    refuse_set,
    schema_text,
    unsupported,
)
from edge_run.runtime.server.service import Service

API_VERSION = "0.12.0"  # of Ollama, whose API this is: clients ask for a least one
_NANOSECONDS = 1e9


class OllamaOptions(SamplingFields, kw_only=True):
    """How tokens are chosen. num_predict: at most so many tokens, -1: no limit, -2: as the context holds."""

    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None


class OllamaFunction(msgspec.Struct):
    """A function that was called."""

    name: Name
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


class OllamaCall(msgspec.Struct):
    """A call that an earlier answer made."""

    function: OllamaFunction
    id: Name = ""


class OllamaMessage(msgspec.Struct):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: Name | None = None
    tool_call_id: Name | None = None


class ShowRequest(msgspec.Struct):
    """Which model is described."""

    model: Name = ""
    name: Name = ""


class OllamaRequest(msgspec.Struct, kw_only=True):
    """What requests of both kinds say. Go's clients write null for what is not set."""

    model: Name | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | Name | None = None
    keep_alive: KeepAlive = None
    cache_salt: Name | None = None

    @property
    def said(self) -> OllamaOptions:
        """What it says of sampling."""
        return self.options or OllamaOptions()

    @property
    def is_stream(self) -> bool:
        """Whether the answer comes in pieces, as it does where nothing is said."""
        return self.stream is not False

    def sampling(self, defaults: SamplingConfig) -> SamplingConfig:
        """Return how tokens are chosen. Raises Refusal."""
        form = {"type": "object"} if self.format == "json" else self.format
        if isinstance(form, str) and form:
            raise Refusal(400, "format: must be json, or a JSON schema", param="format")
        return self.said.sampling_with(defaults, schema_text(form, "format") if isinstance(form, dict) else None)

    def variables(self) -> dict[str, Any]:
        """Return what the template is told besides."""
        if self.think is None:
            return {}
        return {
            "enable_thinking": bool(self.think),
            **({"reasoning_effort": self.think} if isinstance(self.think, str) else {}),
        }


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """A conversation to be answered."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MOST_MESSAGES)] | None = None
    tools: list[ToolEntry] | None = None

    def task(self) -> ChatTask:
        """Return what is to be answered. Raises Refusal. May take its time."""
        messages = self.messages or []
        for index, message in enumerate(messages):
            if message.images and message.role != "tool":
                raise unsupported(f"messages[{index}].images", "this server reads text only")
        toolbox = Toolbox([entry.tool() for entry in self.tools or ()])
        return ChatTask(_template_messages(messages), toolbox, self.variables(), salt=self.cache_salt)


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """A prompt to be answered, or with raw to be continued as it is."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    images: list[Any] | None = None
    template: str | None = None

    def check(self) -> None:
        """Raise Refusal for what cannot be served."""
        refuse_set(self, "images", "template")


async def ollama_chat(service: Service, request: Request) -> ASGIApp:
    """Answer a conversation; without messages, say that the model is loaded."""
    asked = await service.read(request, OllamaChatRequest)
    entry, keep_s = service.catalogue.asked(asked.model), rest_s(asked.keep_alive)
    if not asked.messages:
        return json_response(
            {**_head(entry.name), "message": _message(), **await _loaded(service, request, entry, keep_s)}
        )

    sampling = asked.sampling(service.defaults.sampling)

    async def make_job(served: ServedModel) -> Job:
        service.catalogue.keep_open(keep_s)
        task = await served.prepare(asked.task)
        return await task.job(served, sampling, asked.said.num_predict)

    return AnswerResponse(service, entry, make_job, OllamaForm(entry.name, is_chat=True), asked.is_stream)


async def ollama_generate(service: Service, request: Request) -> ASGIApp:
    """Answer or continue a prompt; without one, say that the model is loaded."""
    asked = await service.read(request, OllamaGenerateRequest)
    asked.check()
    entry, keep_s = service.catalogue.asked(asked.model), rest_s(asked.keep_alive)
    if not asked.prompt:
        return json_response({**_head(entry.name), "response": "", **await _loaded(service, request, entry, keep_s)})

    sampling = asked.sampling(service.defaults.sampling)

    async def make_job(served: ServedModel) -> Job:
        service.catalogue.keep_open(keep_s)
        return await generate_job(asked, asked.prompt or "", sampling, served)

    return AnswerResponse(service, entry, make_job, OllamaForm(entry.name, is_chat=False), asked.is_stream)


async def generate_job(asked: OllamaGenerateRequest, prompt: str, sampling: SamplingConfig, served: ServedModel) -> Job:
    """Return what is to be generated for a prompt. Raises Refusal, and errors of ours."""
    most = asked.said.num_predict
    if asked.suffix or asked.raw or not served.model.has_chat_template:
        if asked.suffix:  # with which the prompt and it are taken as they are, as Ollama's models for code have it
            tokens = await served.prepare(gap_tokens, served.model, prompt, asked.suffix)
        else:
            has_system = asked.system and not asked.raw
            tokens = await served.prompt_tokens(f"{asked.system}\n{prompt}" if has_system else prompt)
        return Job(tokens, sampling, served.limit(most), salt=served.salt(asked.cache_salt))
    system = [{"role": "system", "content": asked.system}] if asked.system else []
    messages = [*system, {"role": "user", "content": prompt}]
    task = ChatTask(messages, variables=asked.variables(), salt=asked.cache_salt)
    return await task.job(served, sampling, most)


async def _loaded(service: Service, request: Request, entry: ModelEntry, keep_s: float | None) -> dict[str, Any]:
    """Open a model for requests to come, or have it closed where it is kept for no time; return what is said of it."""
    if keep_s != 0:
        async with service.visit(entry, request):
            service.catalogue.keep_open(keep_s)
    elif service.catalogue.is_open(entry):
        service.catalogue.keep_open(0)
    return {"done": True, "done_reason": "unload" if keep_s == 0 else "load"}


async def tags(service: Service, request: Request) -> Response:
    """List the models."""
    return json_response({"models": [_model_document(service, entry) for entry in service.catalogue.known.entries]})


async def running_models(service: Service, request: Request) -> Response:
    """List the model that is open."""
    if (found := service.catalogue.open) is None:
        return json_response({"models": []})
    expires = found.expires_at.isoformat() if found.expires_at else "9999-12-31T23:59:59Z"
    loaded = {"expires_at": expires, "size_vram": 0, "context_length": found.model.context_tokens}
    return json_response({"models": [{**_model_document(service, found.entry), **loaded}]})


async def show(service: Service, request: Request) -> Response:
    """Describe a model, as far as it can be without opening it."""
    asked = await service.read(request, ShowRequest)
    entry = service.catalogue.asked(asked.model or asked.name)
    found = service.catalogue.open
    is_open = found is not None and found.entry == entry
    template = found.model.chat_template if found and is_open else entry.chat_template
    context = found.model.context_tokens if found and is_open else entry.trained_context_tokens
    info: dict[str, Any] = {"general.architecture": entry.architecture, f"{entry.architecture}.context_length": context}
    if (shape := found.model.embedding if found and is_open else None) is not None:
        info[f"{entry.architecture}.embedding_length"] = shape.width
    if shape or (entry.makes_embeddings and not is_open):
        capabilities = ["embedding"]
    else:
        capabilities = ["completion", *(["tools"] if template else []), *(["thinking"] if can_think(template) else [])]
    return json_response(
        {
            "modelfile": "",
            "parameters": "",
            "template": template,
            "details": _details(entry),
            "model_info": info,
            "capabilities": capabilities,
        }
    )


async def version(service: Service, request: Request) -> Response:
    """Say whose API this is."""
    return json_response({"version": API_VERSION})


class OllamaForm(AnswerForm):
    """Answers as a line of JSON each."""

    media_type = JSON_LINES

    def __init__(self, name: str, is_chat: bool) -> None:
        self._name, self._is_chat = name, is_chat

    def piece(self, number: int, delta: Delta) -> bytes:
        """Return a line."""
        calls = [delta.call] if delta.call else []
        if not (delta.content or delta.reasoning or calls):
            return b""
        return _line({**self._said(delta.content, delta.reasoning, calls), "done": False})

    def end(self, outcomes: Sequence[FinishedAnswer]) -> bytes:
        """Return the last line: why it ended, and what it took."""
        return _line({**self._said(), **_ending(outcomes[0])})

    def failed(self, refusal: Refusal) -> bytes:
        """Return the error."""
        return _line({"error": refusal.message})

    def silence(self) -> bytes:
        """Return a line that says nothing: lines of JSON have no comments, and clients take silence for a failure."""
        return _line({**self._said(), "done": False})

    def whole(self, outcomes: Sequence[FinishedAnswer]) -> bytes:
        """Return the answer."""
        (outcome,) = outcomes
        said = self._said(outcome.content, outcome.reasoning, outcome.calls)
        return msgspec.json.encode({**said, **_ending(outcome)})

    def _said(self, content: str = "", thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        if self._is_chat:
            return {**_head(self._name), "message": _message(content, thinking, calls)}
        thought = {"thinking": thinking} if thinking else {}
        return {**_head(self._name), "response": content, **thought}


def _line(document: Any) -> bytes:
    return one_line(document) + b"\n"


def _head(name: str) -> dict[str, Any]:
    return {"model": name, "created_at": datetime.now(timezone.utc).isoformat()}


def _message(content: str = "", thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking:
        made["thinking"] = thinking
    if calls:
        functions = [(call.id, {"name": call.name, "arguments": call.parsed}) for call in calls]
        made["tool_calls"] = [{"id": identity, "function": function} for identity, function in functions]
    return made


def _ending(outcome: FinishedAnswer) -> dict[str, Any]:
    generation = outcome.generation
    read = generation.prompt_tokens - generation.cached_tokens
    prefill, decode = generation.prefill_tokens_per_s, generation.decode_tokens_per_s
    prompt_s = read / prefill if prefill else 0.0
    decode_s = max(0, generation.completion_tokens - 1) / decode if decode else 0.0
    return {
        "done": True,
        "done_reason": "length" if outcome.finish == "length" else "stop",
        "total_duration": round((generation.ttft_s + decode_s) * _NANOSECONDS),
        "load_duration": 0,
        "prompt_eval_count": generation.prompt_tokens,
        "prompt_eval_duration": round(prompt_s * _NANOSECONDS),
        "eval_count": generation.completion_tokens,
        "eval_duration": round(decode_s * _NANOSECONDS),
    }


def _template_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return a conversation as templates know it: each result has the identity of the call that it answers."""
    found: list[dict[str, Any]] = []
    given = {call.id for message in messages for call in message.tool_calls or ()}
    identities = (made for made in map("call_{}".format, itertools.count()) if made not in given)
    unanswered: dict[str, str] = {}  # the calls of the last message that has some, with the names of their functions
    for message in messages:
        pictures = [left_out("image")] if message.images else []
        made: dict[str, Any] = {"role": message.role, "content": joined([message.content or "", *pictures])}
        if message.tool_calls:
            made["tool_calls"] = [
                {"id": call.id or next(identities), "type": "function", "function": msgspec.to_builtins(call.function)}
                for call in message.tool_calls
            ]
            unanswered = {call["id"]: call["function"]["name"] for call in made["tool_calls"]}
        elif message.role == "tool" and (identity := _answered(message, unanswered)):
            unanswered.pop(identity, None)
            made["tool_call_id"] = identity
        for key, value in (("reasoning_content", message.thinking), ("name", message.tool_name)):
            if value:
                made[key] = value
        found.append(made)
    return found


def _answered(message: OllamaMessage, unanswered: Mapping[str, str]) -> str | None:
    """Return which call a result answers: that which it names, else the next one of its tool, else the next one."""
    named = (identity for identity, name in unanswered.items() if name == message.tool_name)
    return message.tool_call_id or next(named, next(iter(unanswered), None))


def _model_document(service: Service, entry: ModelEntry) -> dict[str, Any]:
    name, size = f"{entry.name}:latest", entry.size_bytes
    modified = datetime.fromtimestamp(service.since_s(entry), timezone.utc).isoformat()
    identity = hashlib.sha256(f"{name} {size}".encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": modified,
        "size": size,
        "digest": identity,
        "details": _details(entry),
    }


def _details(entry: ModelEntry) -> dict[str, Any]:
    family = entry.architecture
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": entry.size_label,
        "quantization_level": "",
    }
