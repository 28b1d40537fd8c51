"""`AsyncModel`: a `Model` for asyncio or trio. One thread computes; tasks wait without blocking the loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio

from edge_run.base.config import ModelConfig, ModelOptions
from edge_run.base.errors import Cancelled
from edge_run.base.interrupt import Interrupt
from edge_run.base.mesh import Mesh
from edge_run.base.profile import DeviceProfile
from edge_run.base.results import Forecast, Generation, Numerics, Piece, Plan, Progress, Stats
from edge_run.base.sampling_config import AnswerOptions, ChatOptions
from edge_run.runtime.embedding.results import Embeddings
from edge_run.runtime.embedding.texts import Text
from edge_run.runtime.generation.model import Model
from edge_run.runtime.generation.request import Message, Prompt, Turn, make_request
from edge_run.runtime.generation.shared_passes import SharedPasses
from edge_run.runtime.generation.stream import Stream
from edge_run.runtime.processes.async_owner import AsyncOwner

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from edge_run.runtime.mesh.engine import MeshOptions


class OpeningOptions(ModelOptions, total=False):
    """The keywords of `Model`."""

    chat_template: str | None
    config: ModelConfig | None
    mesh: MeshOptions | Mesh | str | None
    interrupt: Interrupt | None


class TurnOptions(ChatOptions, total=False):
    """The keywords of `AsyncModel.stream_chat`."""

    priority: int
    key: str
    deadline_s: float | None
    salt: str


class AsyncModel(AsyncOwner[Model]):
    """A model shared by tasks. An async context manager: `async with AsyncModel(path) as model`.

    Answers share passes where the model was opened for several (`sequences`); else they run one after the other, first
    come first served. Cancelling a task, or leaving the loop over its pieces, ends its answer: at the next node of the
    pass where it is alone, else after the pass, which goes on for the others. Of answers with a grammar or schema a few
    more are begun than share passes, and the next one when one of them has ended: iterate over each in its own task.
    """

    def __init__(self, path: str | Path, **options: Unpack[OpeningOptions]) -> None:
        """Take the arguments of `Model`; the file is opened by `async with`."""
        super().__init__(partial(Model, path, **options), "AsyncModel(path)")
        # No lock: a generator that was left half way is closed by another task than the one that holds the turn.
        self._turn = anyio.Semaphore(1, max_value=1)
        self._passes: SharedPasses | None = None

    @classmethod
    def of(cls, model: Model) -> AsyncModel:
        """Return an AsyncModel of a model that is open: `async with` takes it over, and closes it at the end."""
        made = cls(model.path)
        made._open = lambda: model
        return made

    @property
    def plan(self) -> Plan:
        """What goes where."""
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

    async def forecast(self, prompt_tokens: int = 512, *, is_packed: bool = False) -> Forecast | None:
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
        prompt: str | Sequence[int],
        *,
        priority: int = 0,
        key: str = "",
        deadline_s: float | None = None,
        salt: str = "",
        **options: Unpack[AnswerOptions],
    ) -> AsyncGenerator[Piece, None]:
        """Continue `prompt`; iterate over the pieces. Arguments and errors as for `Model.generate`.

        Errors come with the first piece; where answers share passes, ConfigError comes at once.
        priority, key, deadline_s, salt: as of `Turn`; all but the last matter where answers share passes.
        """
        return self._stream(self._opened.generate, prompt, options, Turn(priority, key, deadline_s, salt))

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        priority: int = 0,
        key: str = "",
        deadline_s: float | None = None,
        salt: str = "",
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[Piece, None]:
        """Answer a conversation; iterate over the pieces. Arguments and errors as for `Model.stream_chat`.

        priority, key, deadline_s, salt: as of `generate`.
        """
        return self._stream(self._opened.stream_chat, messages, options, Turn(priority, key, deadline_s, salt))

    async def chat(self, messages: Sequence[Message], **options: Unpack[TurnOptions]) -> Generation:
        """Answer a conversation; return the finished answer."""
        generation = None
        async with aclosing(self.stream_chat(messages, **options)) as pieces:
            async for piece in pieces:
                generation = piece.generation
        if generation is None:
            raise Cancelled("the answer was ended before it was finished")
        return generation

    async def embed(self, texts: Text | Sequence[Text], **options: Any) -> Embeddings:
        """Return the vectors of texts, when it is the task's turn; arguments and errors as for `Model.embed`."""
        model = self._opened
        async with self._turn:
            return await self._thread.run(partial(model.embed, texts, **options), model.cancel)

    async def __aexit__(self, *_: object) -> None:
        # Not in turn: a generator that was left half way may hold it for ever. The thread is free between passes.
        self._opened.cancel()
        self._passes = None  # those of the model that is closed
        await super().__aexit__()

    def _stream(
        self, start: Callable[..., Stream], prompt: Prompt, options: Mapping[str, object], turn: Turn
    ) -> AsyncGenerator[Piece, None]:
        given = cast("dict[str, Any]", options)
        if self._opened.most_parallel == 1:
            return self._stream_alone(partial(start, prompt, turn=turn, **given))
        self._passes = self._passes or SharedPasses(self._opened, self._thread)
        return self._passes.stream(make_request(prompt, turn=turn, **given))

    async def _stream_alone(self, start: Callable[[], Stream]) -> AsyncGenerator[Piece, None]:
        """Answer when it is the task's turn."""
        model = self._opened
        compute = partial(self._thread.run, on_cancel=model.cancel)
        async with self._turn:
            stream = await compute(start)
            try:
                while (piece := await compute(partial(next, stream, None))) is not None:
                    yield piece
            finally:
                await self._thread.run(stream.close, is_owed=True)
