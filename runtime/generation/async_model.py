"""`AsyncModel`: a `Model` for asyncio or trio. One thread computes; tasks wait without blocking the loop."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypedDict

import anyio

from edge_run.base.config import ModelConfig, ModelOptions
from edge_run.base.errors import Cancelled, ConfigError
from edge_run.base.interrupt import Interrupt
from edge_run.base.mesh import Mesh, MeshOptions
from edge_run.base.options import Unpack, is_list
from edge_run.base.profile import DeviceProfile
from edge_run.base.protocols import Text
from edge_run.base.results import Forecast, Generation, Numerics, Piece, Plan, Progress, Speculation, Stats
from edge_run.base.sampling_config import AnswerOptions, ChatOptions
from edge_run.runtime.embedding.results import Embeddings, TextVectors
from edge_run.runtime.generation.async_stream import AsyncStream
from edge_run.runtime.generation.model import Model
from edge_run.runtime.generation.report import Course, report
from edge_run.runtime.generation.request import Message, Request, Turn, chat_request, text_request
from edge_run.runtime.generation.shared_passes import SharedPasses
from edge_run.runtime.llama._ggml import rest_threads
from edge_run.runtime.processes.async_owner import AsyncOwner
from edge_run.runtime.processes.fair_room import FairRoom
from edge_run.runtime.scheduling.shares import AGING_S

_LOOKS, _LOOK_S = 20, 0.01  # at who has the turn


class OpeningOptions(ModelOptions, total=False):
    """The keywords of `Model`."""

    chat_template: str | None
    config: ModelConfig | None
    mesh: MeshOptions | Mesh | str | None
    interrupt: Interrupt | None


class _Turns(TypedDict, total=False):
    priority: int
    key: str
    deadline_s: float | None
    salt: str


class CompletionOptions(AnswerOptions, _Turns, total=False):
    """The keywords of `AsyncModel.generate`."""


class TurnOptions(ChatOptions, _Turns, total=False):
    """The keywords of `AsyncModel.stream_chat`."""


class _TurnRoom(FairRoom):
    """Whose turn it is to have an open model answer, where answers run one after the other.

    It is no lock: a generator that was left half way is closed by another task than the one that holds the turn.

    holder: the task that was last given a piece by who holds it.
    """

    holder: int | None = None


class AsyncModel(AsyncOwner[Model]):
    """A model shared by tasks. An async context manager: `async with AsyncModel(path) as model`.

    Answers share passes where the model was opened for several (`sequences`); else they run one after the other: those
    of several keys (`Turn`) in turns, those of one key first come first served. Cancelling a task, or leaving the loop
    over its pieces, ends its answer: at the next node of the pass where it is alone, else after the pass, which goes on
    for the others. Of answers with a grammar or schema a few more are begun than share passes, and the next one when
    one of them has ended: iterate over each in its own task.
    """

    def __init__(self, path: str | Path, **options: Unpack[OpeningOptions]) -> None:
        """Take the arguments of `Model`; the file is opened by `async with`."""

        def open_model(interrupt: Interrupt) -> Model:
            options["interrupt"] = interrupt
            return _waiting_here(Model(path, **options))

        given = options.get("interrupt") or getattr(options.get("mesh"), "interrupt", None)
        super().__init__(open_model, "AsyncModel(path)", given, rest_threads)
        self._turns = _TurnRoom(1, AGING_S)
        self._passes: SharedPasses | None = None

    @classmethod
    def of(cls, model: Model) -> AsyncModel:
        """Return an AsyncModel of a model that is open: `async with` takes it over, and closes it at the end."""
        made = cls(model.path)
        made._open = lambda interrupt: _waiting_here(model)
        return made

    @property
    def model(self) -> Model:
        """The open model, for what any thread may ask of it: tokens, templates, limits. It must not answer beside this.

        What takes its time there, as long texts do, holds up the event loop unless it is asked in a thread.
        """
        return self._opened

    @property
    def plan(self) -> Plan:
        """What goes where, decided when the model was opened."""
        return self._opened.plan

    @property
    def progress(self) -> Progress | None:
        """How far the prompt or token at hand is; None between them."""
        return self._opened.progress

    @property
    def stats(self) -> Stats:
        """Figures since the model was opened, as they are now: a pass may be under way."""
        return self._opened.stats

    async def expect(self, profile: DeviceProfile | None = None) -> None:
        """Let `progress` say what remains as the device of `profile` would take; None is this device.

        After the pass at hand, in the thread of the model.
        """
        await self._thread.run(partial(self._opened.expect, profile))

    async def forecast(self, prompt_tokens: int | None = None, *, is_packed: bool = False) -> Forecast | None:
        """Return how fast it is expected to be, as `Model.forecast` does; after the pass at hand."""
        return await self._thread.run(partial(self._opened.forecast, prompt_tokens, is_packed=is_packed))

    @property
    def numerics(self) -> Numerics:
        """The numerics key: models with equal keys compute equal logits, bit for bit."""
        return self._opened.numerics

    @property
    def notices(self) -> tuple[str, ...]:
        """What could not be done since the model was opened, and the work goes on without, a line each."""
        return self._opened.notices

    def generate(
        self,
        prompt: Text,
        *,
        priority: int = 0,
        key: str = "",
        deadline_s: float | None = None,
        salt: str = "",
        **options: Unpack[AnswerOptions],
    ) -> AsyncStream:
        """Continue `prompt`; iterate over the pieces. Arguments and errors as for `Model.generate`.

        What is wrong with the arguments is raised at once, other errors with the first piece: of those, where answers
        run one after the other, ConfigError for a task that has an answer open, which it would wait for itself to end.
        priority, key, deadline_s, salt: as of `Turn`.
        """
        turn = Turn(priority, key, deadline_s, salt)
        return AsyncStream(self._stream(text_request(prompt, turn=turn, **options)))

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        priority: int = 0,
        key: str = "",
        deadline_s: float | None = None,
        salt: str = "",
        **options: Unpack[ChatOptions],
    ) -> AsyncStream:
        """Answer a conversation; iterate over the pieces. Arguments and errors as for `Model.stream_chat`.

        priority, key, deadline_s, salt: as of `generate`.
        """
        turn = Turn(priority, key, deadline_s, salt)
        return AsyncStream(self._stream(chat_request(messages, turn=turn, **options)))

    async def complete(self, prompt: Text, **options: Unpack[CompletionOptions]) -> Generation:
        """Continue `prompt`; return the finished answer. Arguments and errors as for `generate`."""
        return await self.generate(prompt, **options).result()

    async def chat(self, messages: Sequence[Message], **options: Unpack[TurnOptions]) -> Generation:
        """Answer a conversation; return the finished answer. Arguments and errors as for `stream_chat`."""
        return await self.stream_chat(messages, **options).result()

    async def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        normalize: bool = True,
        truncate: bool = False,
        on_text: Callable[[TextVectors], object] | None = None,
        priority: int = 0,
        key: str = "",
        deadline_s: float | None = None,
    ) -> Embeddings:
        """Return the vectors of texts, when it is the task's turn; arguments and errors as for `Model.embed`.

        texts: one or a list; another iterable is refused, as the model would wait for its texts, and all tasks with it.
        priority, key: as of `Turn`. deadline_s: the seconds after which Cancelled is raised where they are not there.
        """
        if not (isinstance(texts, str) or is_list(texts)):
            raise ConfigError(f"texts {texts!r:.60}: must be text or tokens, or a list of those")
        model, turn = self._opened, Turn(priority, key, deadline_s)
        work = partial(model.embed, texts, normalize=normalize, truncate=truncate, on_text=on_text)
        with anyio.move_on_after(deadline_s):
            async with self._own_turn(turn) as is_held:
                if is_held:
                    return await self._thread.run(work, model.cancel)
        raise Cancelled(f"embed: the vectors were not there within {deadline_s:g} s")

    async def __aexit__(self, *_: object) -> None:
        # Not in turn: a generator that was left half way may hold it for ever. The thread is free between passes.
        self._opened.cancel()
        self._turns, self._passes = _TurnRoom(1, AGING_S), None  # not those of the model that is closed
        await super().__aexit__()

    def _stream(self, request: Request) -> AsyncGenerator[Piece, None]:
        if self._opened.most_parallel == 1:
            return self._stream_alone(request)
        self._passes = self._passes or SharedPasses(self._opened, self._thread)
        return self._passes.stream(request)

    async def _stream_alone(self, request: Request) -> AsyncGenerator[Piece, None]:
        """Answer when it is the task's turn; the wait for that counts towards its deadline."""
        model, turns, asked_s = self._opened, self._turns, time.monotonic()
        compute = partial(self._thread.run, on_cancel=model.cancel)
        async with self._own_turn(request.turn) as is_held:
            if not is_held:  # not `compute`: who is cancelled here must not end the answer of another
                yield await self._thread.run(partial(_late, model, request.after(math.inf)))
                return
            stream = await compute(partial(model._start, request.after(time.monotonic() - asked_s)))
            try:
                while (piece := await compute(partial(next, stream, None))) is not None:
                    yield piece
                    turns.holder = anyio.get_current_task().id
            finally:
                turns.holder = None
                await self._thread.run(stream.close, is_owed=True)

    @asynccontextmanager
    async def _own_turn(self, turn: Turn) -> AsyncGenerator[bool, None]:
        """Wait for the task's turn, `turn` says whose it is; give the block whether it came before its deadline.

        Raises ConfigError where this very task has one, and would wait for ever.
        """
        turns, task = self._turns, anyio.get_current_task().id
        for _ in range(_LOOKS):  # a generator that nobody names any more is closed by the event loop, in a moment
            if turns.holder != task:
                break
            await anyio.sleep(_LOOK_S)
        else:
            raise ConfigError(
                "AsyncModel: this task has an answer open already, and answers run one after the other; read it to its "
                "end, close it with aclose(), or open the model for several (sequences=2)"
            )
        async with turns.held(turn.key, priority=turn.priority, patience_s=turn.deadline_s) as is_held:
            if not is_held:
                yield False
                return
            turns.holder = task
            try:
                yield True
            finally:
                turns.holder = None


def _waiting_here(model: Model) -> Model:
    """Return a model for which this thread, the one of its tasks, waits where another one is at work on it."""
    model._workplace.wait_here()
    return model


def _late(model: Model, request: Request) -> Piece:
    """Return the end of an answer whose time was over before its turn; the one that is being computed goes on."""
    with model.begin(request) as answer:
        return Piece("", (), report(model._engine, model._meter, answer, Course(), "deadline", Speculation()))
