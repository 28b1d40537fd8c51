"""Answers of a model that does what a test says, to a client that sees what a client of the server sees."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread

from catalogues import open_catalogue
from edge_run.base.errors import ConfigError
from edge_run.base.results import Piece, Progress, Speculation
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.server.admission import Admission
from edge_run.runtime.server.answers import AnswerForm, AnswerResponse
from edge_run.runtime.server.apis.openai_completions import CompletionForm, CompletionRequest
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.generating import Job
from edge_run.runtime.server.service import Service

VOCABULARY = 100


class FakeModel:
    """A model whose answers do what the test says."""

    def __init__(self) -> None:
        self.goes_on = anyio.Event()
        self.n_pieces: float = 3
        self.error: Exception | None = None
        self.ended = 0
        self.path, self.has_chat_template, self.is_computing = Path("model.gguf"), True, False
        self.read: Sequence[int] = ()  # the tokens of the prompt that are there, at first and after each pass
        self.was_asked_to_tell = False
        self.numerics, self.forecast = "made up", lambda: None
        self.plan, self.embedding = SimpleNamespace(forecast=None, model_bytes=1), None
        self.context_tokens = self.trained_context_tokens = 100
        self.chat_template = ""
        self.generation: Any = SimpleNamespace(
            logprobs=(),
            finish_reason="length", text="", token_ids=(), prompt_tokens=1, cached_tokens=0, completion_tokens=3,
            decode_tokens_per_s=1.0, prefill_tokens_per_s=1.0, ttft_s=0.1, io=SimpleNamespace(bytes_read=0),
            speculation=Speculation(), seed=1, stop_text="", shifted_tokens=0,
        )  # fmt: skip

    @property
    def progress(self) -> Progress | None:
        """Half of a pass that computes four tokens."""
        return Progress("prompt", 0, 4, 0.5, 1.0, None) if self.is_computing else None

    def metadata(self, key: str) -> str | None:
        return None

    def token_bytes(self, token: int) -> bytes:
        return b""

    def check_tokens(self, what: str, tokens: Iterable[int]) -> None:
        if any(token >= VOCABULARY for token in tokens):
            raise ConfigError(f"{what}: no such token")

    async def generate(self, tokens: Any, **options: Any) -> AsyncGenerator[Piece, None]:
        on_read = options["on_read"]
        self.was_asked_to_tell = on_read is not None
        for n_read in self.read if on_read else ():
            await anyio.to_thread.run_sync(on_read, n_read)  # as the model's thread does
        try:
            await self.goes_on.wait()
            if self.error:
                raise self.error
            number = 0
            while number < self.n_pieces:
                yield Piece("a", (0,))
                number += 1
                await anyio.lowlevel.checkpoint()
            yield Piece("", (), self.generation)
        finally:
            self.ended += 1


class Client:
    """What ASGI sends to, and receives from. It reads as long as nobody says otherwise."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.came, self.leaves, self.reads = anyio.Event(), anyio.Event(), anyio.Event()
        self.reads.set()

    async def receive(self) -> Any:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message["body"]
            self.came.set()


@asynccontextmanager
async def answering(
    model: FakeModel,
    client: Client,
    is_stream: bool = True,
    form: AnswerForm | None = None,
    n_tokens: int = 1,
    is_prepared: anyio.Event | None = None,
    sampling: SamplingConfig | None = None,
) -> AsyncIterator[Service]:
    """Answer a request in this block, and wait for the end of it. form: that of text completions where it is None.

    n_tokens: of the prompt. is_prepared: what its job waits for.
    """
    catalogue = open_catalogue(model)
    service = Service(catalogue, Admission(0))

    async def make_job(served: ServedModel) -> Job:
        if is_prepared:
            await is_prepared.wait()
        return Job([1] * n_tokens, sampling or SamplingConfig())

    form = form or CompletionForm("model", CompletionRequest(prompt=""))
    response = AnswerResponse(service, catalogue.asked("any"), make_job, form, is_stream)
    async with anyio.create_task_group() as group:
        group.start_soon(response, {"type": "http"}, client.receive, client.send)
        with anyio.fail_after(60):
            yield service
