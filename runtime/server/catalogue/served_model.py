"""An open model as requests use it: text to tokens, limits, counts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio.to_thread

from edge_run.base.results import Forecast
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.generation.async_model import AsyncModel
from edge_run.runtime.generation.model import Model
from edge_run.runtime.processes.fair_room import FairRoom
from edge_run.runtime.server.counts import Counts
from edge_run.runtime.server.refusals import Refusal

MOST_UNPREPARED = 32  # requests whose prompt is not rendered yet
_PREPARING = 2  # prompts at once: each may take much memory
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class AnswerDefaults:
    """What counts where a request says nothing: how tokens are chosen, and how many an answer may have at most."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    most_tokens: int | None = None

    def limit(self, max_tokens: int | None) -> int | None:
        """Return how many tokens an answer may have that asks for so many; None or less than 0: as many as may be."""
        if max_tokens is None or max_tokens < 0:
            return self.most_tokens
        return max_tokens if self.most_tokens is None else min(max_tokens, self.most_tokens)


class Preparing:
    """Threads for what takes its time but does not compute, such as templates. Belongs to one event loop.

    Keys take turns. Where MOST_UNPREPARED wait, a key may still have its share of them, until twice as many do.
    """

    def __init__(self) -> None:
        self._room = FairRoom(_PREPARING)

    async def run(self, key: str, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Return what a function returns, called in a thread for a key. Raises Refusal where too many wait for that."""
        share = MOST_UNPREPARED / len(self._room.waiting_keys | {key})
        n_waiting = self._room.n_waiting()
        if n_waiting >= MOST_UNPREPARED and (self._room.n_waiting(key) >= share or n_waiting >= 2 * MOST_UNPREPARED):
            message = "too many requests are being prepared already; try again in a second"
            raise Refusal(429, message, code="queue_full", retry_after_s=1)
        async with self._room.held(key):
            return await anyio.to_thread.run_sync(function, *arguments)


class ServedModel:
    """A model that is open. Belongs to one event loop.

    name: what it is called. model: for what any thread may ask of it. answering: the same model, which tasks share.
    defaults: what counts where a request says nothing. counts: what requests for it came to, before too.
    forecast: how fast it is expected to be; None where the device was not measured. key: whose request it is open for.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        answering: AsyncModel,
        defaults: AnswerDefaults,
        preparing: Preparing,
        counts: Counts,
        forecast: Forecast | None = None,
        key: str = "",
    ) -> None:
        self.name, self.model, self.answering, self.forecast = name, model, answering, forecast
        self.defaults, self.counts, self._preparing, self._key = defaults, counts, preparing, key

    @property
    def sampling(self) -> SamplingConfig:
        """How tokens are chosen where a request says nothing."""
        return self.defaults.sampling

    def limit(self, max_tokens: int | None) -> int | None:
        """Return how many tokens an answer may have that asks for so many; None or less than 0: as many as may be."""
        return self.defaults.limit(max_tokens)

    @property
    def fingerprint(self) -> str:
        """What OpenAI calls `system_fingerprint`: where it is equal, so are answers of equal seeds and settings."""
        return f"b{hashlib.sha256(repr(self.model.numerics).encode()).hexdigest()[:12]}"

    async def prepare(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run in a thread what takes its time but does not compute. Raises Refusal where too many wait for that."""
        return await self._preparing.run(self._key, function, *arguments)

    async def prompt_tokens(self, text: str) -> list[int]:
        """Return the tokens of a text to be continued. Raises ContextFull, ConfigError."""
        return await self.prepare(self.model.prompt_tokens, text)

    def salt(self, cache_salt: str | None) -> str:
        """Return what keeps a request's beginnings apart from others'. Raises Refusal where that cannot be."""
        if cache_salt and self.model.keeps_prompts:
            raise Refusal(
                400,
                "cache_salt: the prompt cache on disk is shared; leave out --prompt-cache",
                param="cache_salt",
                code="unsupported_parameter",
            )
        return cache_salt or ""
