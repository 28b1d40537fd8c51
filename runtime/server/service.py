"""What all requests share: the open model, who is let in, and what is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request

from edge_run.base.results import Generation
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.generation.async_model import AsyncModel
from edge_run.runtime.generation.model import Model
from edge_run.runtime.server.admission import Admission
from edge_run.runtime.server.bodies import BodyRoom
from edge_run.runtime.server.counts import Counts
from edge_run.runtime.server.refusals import Refusal

MOST_UNPREPARED = 32  # requests whose prompt is not rendered yet
_PREPARING = 2  # prompts at once: each may take much memory
_Result = TypeVar("_Result")
_Kind = TypeVar("_Kind")


class Service:
    """A model that is served. Belongs to one event loop.

    model: for what any thread may ask of it. answering: the same model, which tasks share.
    name: what the model is called. sampling: how tokens are chosen where a request says nothing.
    most_tokens: of an answer; None is as many as the context holds. version: of edge-run.
    counts: what requests came to.
    """

    def __init__(
        self,
        model: Model,
        answering: AsyncModel,
        admission: Admission,
        sampling: SamplingConfig | None = None,
        most_tokens: int | None = None,
        version: str = "",
    ) -> None:
        self.model, self.answering, self.admission = model, answering, admission
        self.sampling, self.most_tokens = sampling or SamplingConfig(), most_tokens
        self.version = version
        self.name = model.path.stem
        self.began_s = int(time.time())
        self.counts = Counts()
        self._room = BodyRoom()
        self._preparing = anyio.CapacityLimiter(_PREPARING)

    async def read(self, request: Request, kind: type[_Kind]) -> _Kind:
        """Return the body of a request as a `kind`. Raises Refusal."""
        return await self._room.read(request, kind)

    async def prepare(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run in a thread what takes its time but does not compute. Raises Refusal where too many wait for that."""
        if self._preparing.statistics().tasks_waiting >= MOST_UNPREPARED:
            raise self.admission.refusal()
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._preparing)

    async def prompt_tokens(self, text: str) -> list[int]:
        """Return the tokens of a text to be continued. Raises ContextFull, ConfigError."""
        return await self.prepare(self.model.prompt_tokens, text)

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the text of a conversation to be continued. Raises what `Model.chat_prompt` raises, and Refusal."""
        if not self.model.has_chat_template:
            raise Refusal(400, "the model has no chat template: only plain completions work", code="not_supported")
        return await self.prepare(self.model.chat_prompt, messages, variables)

    def limit(self, max_tokens: int | None) -> int | None:
        """Return how many tokens an answer may have that asks for so many; None or less than 0: as many as may be."""
        if max_tokens is None or max_tokens < 0:
            return self.most_tokens
        return max_tokens if self.most_tokens is None else min(max_tokens, self.most_tokens)

    def stop_text(self, generation: Generation, stops: Sequence[str]) -> str:
        """Return the stop string that ended an answer; empty where none did."""
        if generation.finish_reason != "stop" or not stops:
            return ""
        rest = self.model.detokenize(generation.token_ids)[len(generation.text) :]
        return next((stop for stop in stops if rest.startswith(stop)), "")
