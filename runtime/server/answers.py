"""Answers on the wire: whole, or as a stream whose headers go out soon and which never falls silent for long."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge_run.base.errors import EdgeRunError
from edge_run.runtime.formats.output import Delta
from edge_run.runtime.server.access import whose
from edge_run.runtime.server.admission import Place
from edge_run.runtime.server.bodies import BODY
from edge_run.runtime.server.catalogue.folder import ModelEntry
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.generating import FinishedAnswer, Job, generate
from edge_run.runtime.server.refusals import CONTEXT_LENGTH_EXCEEDED, Refusal, refusal_of, shutting_down
from edge_run.runtime.server.service import Service
from edge_run.runtime.server.tasks import until_client_leaves
from edge_run.runtime.server.usage import PromptReading

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

EVENT_STREAM, JSON_LINES, JSON = "text/event-stream; charset=utf-8", "application/x-ndjson", "application/json"
# What is refused within QUICK_S has a status of HTTP. Prompts, grammars, schemas and forced calls have SILENCE_S where
# the model is open and nobody waits for another one.
QUICK_S = 0.25
SILENCE_S = 5.0  # clients and proxies take a longer one for a failure
PROGRESS_S = 1.0
MOST_FRAMES = 8192  # that a client may be behind
COMMENT = b": the answer is being computed\n\n"
_LINE_ENDS = ("\x85", "\u2028", "\u2029")  # of Unicode, which JSON leaves as they are


class _First(bytes):
    """What a stream begins with."""


class _Last(bytes):
    """What an answer ends with."""


_Item = bytes | _First | _Last | Refusal
MakeJob = Callable[[ServedModel], Awaitable[Job]]

logger = logging.getLogger(__name__)


class AnswerForm(ABC):
    """How an API writes answers. One request each; every method returns what goes on the wire, maybe nothing.

    wants_progress: whether the client wants to know how far the prompt is.
    prompt_param: which part of a request is answered.
    streams_too_long: whether clients look in the stream, and not at the status, for a prompt that is too long.
    `failed` and `silence` may be called at any time, the others after `begin`.
    """

    media_type = EVENT_STREAM
    wants_progress = False
    prompt_param = "prompt"
    streams_too_long = False

    def begin(self, served: ServedModel, job: Job) -> bytes:
        """Take note of what is answered, and by what. What a stream begins with."""
        return b""

    @abstractmethod
    def piece(self, number: int, delta: Delta) -> bytes:
        """What the answer of this number goes on by."""

    @abstractmethod
    def end(self, outcomes: Sequence[FinishedAnswer]) -> bytes:
        """What a stream ends with, when all answers are finished."""

    @abstractmethod
    def failed(self, refusal: Refusal) -> bytes:
        """What a stream ends with instead."""

    def silence(self) -> bytes:
        """What a stream says where nothing has come for a while. Nothing: a comment will do, where it may have one."""
        return b""

    def progress(self, number: int, said: Mapping[str, Any]) -> bytes:
        """How far the prompt of an answer is, for who wants to know. said: that in llama-server's words."""
        return b""

    @abstractmethod
    def whole(self, outcomes: Sequence[FinishedAnswer]) -> bytes:
        """The answers as one document."""


def one_line(document: Any) -> bytes:
    """Return JSON that is one line also to clients that take more than a line break for the end of one."""
    line: bytes = msgspec.json.encode(document)
    for end in _LINE_ENDS:
        line = line.replace(end.encode(), b"\\u%04x" % ord(end))
    return line


def event(document: Any, name: str = "") -> bytes:
    """Return a server-sent event of a document."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + one_line(document) + b"\n\n"


def json_response(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a document as a response."""
    return Response(msgspec.json.encode(document), status, headers, JSON)


def _no_text(name: str) -> Refusal:
    """Return the refusal of text by a model that was opened for embeddings."""
    return Refusal(
        400,
        f"{name} makes embeddings and no text: ask at /v1/embeddings, /api/embed or /embeddings, or serve a model that "
        "generates text",
        param="model",
        code="not_supported",
    )


class AnswerResponse:
    """An ASGI response that generates. It ends the generation when its client goes away, or when it is cancelled.

    entry: the model that answers, when it is its turn. make_job: says what is to be generated, once the model is open.
    """

    def __init__(
        self, service: Service, entry: ModelEntry, make_job: MakeJob, form: AnswerForm, is_stream: bool
    ) -> None:
        self._service, self._entry, self._make_job = service, entry, make_job
        self._form, self._is_stream = form, is_stream
        self._served: ServedModel | None = None
        self._has_grammar = False
        self._readings: dict[int, PromptReading] = {}  # of the prompts that are being read
        self._body: contextlib.ExitStack | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises Refusal, or an error of ours, where nothing was sent yet."""
        key, self._body = whose(scope), scope.get(BODY)
        with self._service.admission.place(self._entry.name, key) as place:
            sender, receiver = anyio.create_memory_object_stream[_Item](MOST_FRAMES)
            async with until_client_leaves(receive) as client:
                client.group.start_soon(self._compute, key, place, sender, client.end, name="edge-run-answer")
                with receiver, contextlib.suppress(anyio.EndOfStream):
                    if self._is_stream:
                        await self._write_stream(send, receiver)
                    else:
                        await self._write_whole(send, receiver)
                    client.end()
            if not client.is_over:
                logger.error("an answer was lost: its task was cancelled, though by nobody here")
                raise Refusal(500, "the answer was lost", code="lost")

    async def _compute(
        self, key: str, place: Place, sender: MemoryObjectSendStream[_Item], leave: Callable[[], None]
    ) -> None:
        """Generate; put what is to be written into `sender`. `leave` where the client reads too slowly."""
        counts, reason = self._service.counts_of(self._entry.name), "abort"
        with sender, contextlib.suppress(anyio.BrokenResourceError):  # who would write it has left, as the client has
            try:
                with place.scope:
                    async with self._service.hold(self._entry, key) as served:
                        await self._answer(served, key, place, sender)
                    reason = ""
                if place.scope.cancelled_caught:
                    sender.send_nowait(shutting_down())
            except (EdgeRunError, Refusal) as error:
                reason = "error"
                sender.send_nowait(error if isinstance(error, Refusal) else refusal_of(error, self._form.prompt_param))
            except anyio.WouldBlock:
                logger.info("a client is dropped that is %d pieces behind", MOST_FRAMES)
                leave()
            finally:
                counts.request_s.add(place.age_s)
                if reason:
                    counts.end(reason)

    async def _answer(self, served: ServedModel, key: str, place: Place, sender: MemoryObjectSendStream[_Item]) -> None:
        def take(number: int, delta: Delta) -> None:
            if self._is_stream and (frame := self._form.piece(number, delta)):
                sender.send_nowait(frame)

        def count(n_tokens: int) -> None:
            if not place.has_begun:
                place.begin()
                counts.first_token_s.add(place.age_s)
            counts.generated_tokens += n_tokens

        def read(number: int, n_tokens: int, n_read: int) -> None:
            loop.call_soon_threadsafe(self._note_read, sender, number, n_tokens, n_read)

        counts, loop = served.counts, asyncio.get_running_loop()
        if served.model.embedding is not None:
            raise _no_text(served.name)
        job = dataclasses.replace(await self._make_job(served), key=key)
        del self._make_job  # and with it what was asked, which takes more than the tokens that came of it
        if self._body:
            self._body.close()
        job.check(served.model.context_tokens)
        served.model.check_tokens("logit bias", job.sampling.logit_bias)
        opening = self._form.begin(served, job)  # before any piece: some forms number what they write
        self._served, self._has_grammar = served, job.has_grammar
        if self._is_stream:
            sender.send_nowait(_First(opening))
        wants_progress = self._is_stream and self._form.wants_progress
        outcomes = await generate(served.answering, job, take, count, read if wants_progress else None)
        if self._is_stream:
            written = self._form.end(outcomes)
        elif job.sampling.top_logprobs is None:
            written = self._form.whole(outcomes)
        else:  # which takes a second for as many as may be told of
            written = await anyio.to_thread.run_sync(self._form.whole, outcomes)
        for outcome in outcomes:
            counts.answer(outcome.generation, outcome.finish)
        sender.send_nowait(_Last(written))

    def _note_read(self, sender: MemoryObjectSendStream[_Item], number: int, n_tokens: int, n_read: int) -> None:
        """So much of a prompt is read: have that written. Without effect where nobody writes any more."""
        reading = self._readings.setdefault(number, PromptReading(n_tokens, n_read, n_read, time.monotonic()))
        reading.n_read = n_read
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.WouldBlock):
            sender.send_nowait(self._progress(number))
        if n_read == n_tokens:
            del self._readings[number]

    def _progress(self, number: int) -> bytes:
        """Return how far the prompt of an answer is, while it is read."""
        work = self._served.model.progress if self._served else None
        return self._form.progress(number, self._readings[number].llama_progress(work, time.monotonic()))

    async def _write_whole(self, send: Send, receiver: MemoryObjectReceiveStream[_Item]) -> None:
        item = await receiver.receive()
        if isinstance(item, Refusal):
            raise item
        await send(_start(JSON, len(item)))
        await send(_body(item, is_last=True))

    async def _write_stream(self, send: Send, receiver: MemoryObjectReceiveStream[_Item]) -> None:
        opening, began_s = b"", anyio.current_time()
        item: _Item | None = None
        patience_s = SILENCE_S if self._service.catalogue.is_at_hand(self._entry) else QUICK_S
        with anyio.move_on_after(patience_s):
            item = await receiver.receive()
        if isinstance(item, _First):
            opening = item
            item = None
            until_s = began_s + SILENCE_S if self._has_grammar else anyio.current_time() + QUICK_S
            with anyio.CancelScope(deadline=until_s):
                item = await receiver.receive()
        if isinstance(item, Refusal) and not (self._form.streams_too_long and item.code == CONTEXT_LENGTH_EXCEEDED):
            raise item
        await send(_start(self._form.media_type))
        frames = [opening, self._form.failed(item) if isinstance(item, Refusal) else item or b""]
        pause_s = PROGRESS_S if self._form.wants_progress else SILENCE_S
        while True:
            while item is not None and not isinstance(item, _Last | Refusal):  # what is at hand is written at once
                try:
                    item = receiver.receive_nowait()
                except anyio.WouldBlock:
                    break
                frames.append(self._form.failed(item) if isinstance(item, Refusal) else item)
            if frame := b"".join(frames):
                await send(_body(frame))
            if isinstance(item, _Last | Refusal):
                break
            item = await _next(receiver, pause_s)
            if isinstance(item, Refusal):
                frames = [self._form.failed(item)]
            else:
                frames = [self._fill_silence() if item is None else item]
        await send(_body(b"", is_last=True))

    def _fill_silence(self) -> bytes:
        """Return what to say where nothing else is at hand."""
        frame = b"".join(map(self._progress, self._readings)) or self._form.silence()
        return frame or (COMMENT if self._form.media_type == EVENT_STREAM else b"")


async def _next(receiver: MemoryObjectReceiveStream[_Item], patience_s: float) -> _Item | None:
    """Return what comes within so many seconds; None where nothing does, and nothing is at hand then."""
    with anyio.move_on_after(patience_s):
        return await receiver.receive()
    with contextlib.suppress(anyio.WouldBlock):  # it came in the moment that the wait was over
        return receiver.receive_nowait()
    return None


def _start(media_type: str, n_bytes: int | None = None) -> dict[str, Any]:
    headers = [(b"content-type", media_type.encode())]
    if n_bytes is None:
        headers.append((b"x-accel-buffering", b"no"))  # or proxies would hold back what comes
    else:
        headers.append((b"content-length", str(n_bytes).encode()))
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _body(data: bytes, is_last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}
