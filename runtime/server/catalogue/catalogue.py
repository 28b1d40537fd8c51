"""The models that can be asked for, and the one of them that is open: a request holds it while it is answered."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from edge_run.base.errors import EdgeRunError, KernelError, ModelFileMissing
from edge_run.base.interrupt import Interrupt
from edge_run.base.results import Forecast
from edge_run.runtime.generation.async_model import AsyncModel
from edge_run.runtime.generation.model import Model
from edge_run.runtime.processes.drive_thread import at_drive
from edge_run.runtime.server.catalogue.folder import ModelEntry, ModelFolder, without_folder
from edge_run.runtime.server.catalogue.known_models import KnownModels
from edge_run.runtime.server.catalogue.turns import ModelTurn, Turns
from edge_run.runtime.server.refusals import Refusal

MOST_WAIT_S = 600.0  # for another model: clients give up by then
ENDING_S = 5.0  # that an opening may take to end with the server
LONGEST_REST_S = 10 * 365 * 86400.0  # a longer one is for ever
COLLECTIONS_TO_A_FULL_ONE = 100  # which takes 0.15 s where a thousand requests wait; Python's own is 10

logger = logging.getLogger(__name__)


def spare_collections() -> None:
    """Have garbage collection leave out what is there now, and look through the rest rarely: that stops the loop."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], COLLECTIONS_TO_A_FULL_ONE)


def as_opened(entry: ModelEntry, model: Model) -> ModelEntry:
    """Return what there is to say of a model that was opened as the command says, which may be other than its file."""
    return dataclasses.replace(
        entry,
        size_bytes=model.plan.model_bytes,
        architecture=model.metadata("general.architecture") or "",
        size_label=model.metadata("general.size_label") or "",
        trained_context_tokens=model.trained_context_tokens,
        chat_template=model.chat_template,
        makes_embeddings=model.embedding is not None,
    )


class OpenModel:
    """The model that is open. Belongs to one event loop.

    model: for what any thread may ask of it. answering: the same model, which tasks share.
    keep_s: how long it stays open when nobody uses it; None: until another one is needed.
    expires_at: when that is over; None while it is used, or for never.
    forecast: how fast it is expected to be; None where the device was not measured.
    """

    def __init__(self, entry: ModelEntry, model: Model, answering: AsyncModel, forecast: Forecast | None) -> None:
        self.entry, self.model, self.answering, self.forecast = entry, model, answering, forecast
        self.keep_s: float | None = None
        self.expires_at: datetime | None = None
        self._resting: anyio.CancelScope | None = None

    def rest(self, group: TaskGroup, close: Callable[[], None]) -> None:
        """Have `close` called by a task of `group` when `keep_s` is over, unless it is woken before."""
        self.wake()
        if self.keep_s is None:
            return
        self.expires_at = datetime.now(timezone.utc) + timedelta(seconds=self.keep_s)
        scope = self._resting = anyio.CancelScope()

        async def close_later(seconds: float) -> None:
            with scope:
                await anyio.sleep(seconds)
            if not scope.cancel_called:
                close()

        group.start_soon(close_later, self.keep_s, name="edge-run-close-model")

    def wake(self) -> None:
        """Let it rest no more: it is used, or closed."""
        self.expires_at = None
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None


class Catalogue:
    """The models of a server. An async context manager; belongs to one event loop.

    It is over 200 lines because whatever becomes of a model, or of its file, concerns all who use it or wait.

    found: what can be asked for. open_file: opens a file, in a thread, until the interrupt ends that.
    read_entries: says anew what there is, in a thread; None: there is one model, which stays open, whatever model a
    request names. say: told in a line what cannot be opened.
    """

    def __init__(
        self,
        found: ModelFolder,
        open_file: Callable[[Path, Interrupt], Model],
        read_entries: Callable[[], ModelFolder] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.known = KnownModels(found)
        self._open_file, self._read_entries, self._say = open_file, read_entries, say
        self._turns = Turns()
        self._waiting: dict[ModelTurn, anyio.Event] = {}
        self._group: TaskGroup | None = None
        self._opening: _Opening | None = None
        self._closing = ""  # the model that is being closed
        self._failure: Exception | None = None  # of the opening of the one model
        self.open: OpenModel | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether there is one model, which stays open."""
        return self._read_entries is None

    @property
    def is_usable(self) -> bool:
        """Whether requests have an answer before long: not while the one model is opened."""
        return self.open is not None or not self.is_fixed

    async def open_only(self) -> OpenModel:
        """Open the one model; return it. Raises what opening it raises, as it is."""
        try:
            async with self.hold(self.known.entries[0]) as found:
                return found
        except EdgeRunError as error:
            raise self._failure or error from None

    def state(self, name: str) -> str:
        """Return how a model is: `loaded`, `loading`, `failed` or `unloaded`."""
        if self.open is not None and self.open.entry.name == name:
            return "loaded"
        if self._turns.is_changing and any(turn.name == name for turn in self._turns.waiting):
            return "loading"
        return "failed" if self.known.failure(name) else "unloaded"

    def asked(self, name: str | None) -> ModelEntry:
        """Return the model that a request asks for; one that names none has the open one. Raises Refusal."""
        if self.is_fixed or not name:
            if self.open is not None:
                return self.open.entry
            if self.known.entries:
                return self.known.entries[0]
        elif (found := self.known.named(name)) is not None:
            return found
        raise Refusal(
            404, "there is no model of this name; /v1/models lists them", param="model", code="model_not_found"
        )

    def is_open(self, entry: ModelEntry) -> bool:
        """Return whether a model is open."""
        return self.open is not None and self.open.entry == entry

    def is_at_hand(self, entry: ModelEntry) -> bool:
        """Return whether a request for a model need not wait for it."""
        return self.is_open(entry) and not self._turns.waiting

    @contextlib.asynccontextmanager
    async def hold(self, entry: ModelEntry) -> AsyncIterator[OpenModel]:
        """Keep a model open in this block, once it is its turn. Raises Refusal, and what `Model` raises.

        What is raised in the block too comes without the folder of the model's file.
        """
        if (error := self.known.failure(entry.name)) is not None:
            raise dataclasses.replace(error)  # a new one, or it would keep all that raising it left in its traceback
        turn = self._turns.ask(entry.name)
        self._waiting[turn] = anyio.Event()
        try:
            self._settle()
            with anyio.move_on_after(None if self.is_fixed else MOST_WAIT_S):
                await self._waiting[turn].wait()
            if turn.error:
                raise dataclasses.replace(turn.error)
            if not turn.is_in or self.open is None:
                raise _busy(self._closing)
            self.open.wake()
            yield self.open
        except EdgeRunError as raised:
            raise _without_folder(raised, entry) from raised
        finally:
            del self._waiting[turn]
            self._turns.leave(turn)
            self._rest()
            self._settle()

    def keep_open(self, seconds: float | None) -> None:
        """Have the model that is open closed when nobody has used it for so many seconds; None: when it must be."""
        if self.open is not None and not self.is_fixed:
            self.open.keep_s = None if seconds is None or seconds > LONGEST_REST_S else seconds
            self._rest()

    async def read_again(self) -> None:
        """Find out anew what there is; a model whose file is another one now is closed. Raises ConfigError."""
        if self._read_entries is None:
            return
        self.known = KnownModels(await at_drive(self._read_entries))
        if self.open is not None and self.open.entry not in self.known.entries:
            self._turns.close_when_idle()
        for turn in [turn for turn in self._turns.waiting if self.known.named(turn.name) is None]:
            self._turns.leave(turn)
            turn.error = ModelFileMissing(f"{turn.name}: its file is gone")
        self._settle()

    async def __aenter__(self) -> Catalogue:
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._group is not None
        self._group.cancel_scope.cancel()
        if self._opening:
            self._opening.end()
        await self._group.__aexit__(None, None, None)
        await self._close()

    def _settle(self) -> None:
        """Let in who may go on, and change the model where it is time."""
        change = self._turns.decide()
        if change is not None:
            assert self._group is not None, "a catalogue that changes models is used as `async with`"
            self._group.start_soon(self._change, change.name, name="edge-run-change-model")
        for turn, event in self._waiting.items():
            if turn.is_in or turn.error:
                event.set()

    def _rest(self) -> None:
        """Where nobody uses the open model any more, have it closed in due time."""
        if self.open is not None and not self._turns.users and self._group is not None:
            self.open.rest(self._group, self._close_when_idle)

    def _close_when_idle(self) -> None:
        self._turns.close_when_idle()
        self._settle()

    async def _change(self, name: str | None) -> None:
        """Close the model that is open; open another one."""
        await self._close()
        entry = self.known.named(name) if name else None
        if entry is None:
            self._turns.closed()
        else:
            try:
                await self._open(entry)
                if self.open and self.open.entry not in self.known.entries:  # its file became another one meanwhile
                    self._turns.close_when_idle()
            except Exception as error:
                if self._opening and self._opening.is_ended:
                    return
                if self.is_fixed:  # a server of many goes on, and its traceback would keep what opening it left
                    self._failure = error
                known = error if isinstance(error, EdgeRunError) else KernelError(f"{entry.name}: {error!r}")
                self._say(f"{entry.name} cannot be opened: {known}")
                known = _without_folder(known, entry)
                if entry in self.known.entries:
                    self.known.note_failure(entry.name, known)
                self._turns.failed(entry.name, known)
        self._settle()

    async def _open(self, entry: ModelEntry) -> None:
        began_s = time.monotonic()
        self._opening = _Opening()
        model = await self._opening.run(self._open_file, entry.path)
        if model is None:
            return
        try:
            forecast = await anyio.to_thread.run_sync(model.forecast)
            spare_collections()
            answering = await AsyncModel.of(model).__aenter__()
        except BaseException:
            model.close()
            raise
        if self.is_fixed:
            entry = as_opened(entry, model)
            self.known = KnownModels(ModelFolder((entry,)))
        self.open = OpenModel(entry, model, answering, forecast)
        took_s = time.monotonic() - began_s
        self._turns.opened(entry.name, took_s)
        logger.info("%s is open after %.1f s", entry.name, took_s)

    async def _close(self) -> None:
        closing, self.open = self.open, None
        if closing is not None:
            closing.wake()
            self._closing = closing.entry.name
            with anyio.CancelScope(shield=True):
                await closing.answering.__aexit__()
            self._closing = ""
            gc.unfreeze()
            logger.info("%s is closed", closing.entry.name)


class _Opening:
    """The opening of a model, in a thread, until it is ended."""

    def __init__(self) -> None:
        self._interrupt, self._scope = Interrupt(), anyio.CancelScope(shield=True)
        self.is_ended = False

    async def run(self, open_file: Callable[[Path, Interrupt], Model], path: Path) -> Model | None:
        """Return the model; None where it was ended and hangs at a drive, so that the thread is left."""
        with self._scope:
            return await at_drive(open_file, path, self._interrupt)
        return None

    def end(self) -> None:
        """Have it ended, and waited for so long and no longer."""
        self.is_ended = True
        self._interrupt.cancel()
        self._scope.deadline = anyio.current_time() + ENDING_S


def _busy(closing: str) -> Refusal:
    """Return what is told who waited for another model in vain. closing: the one that is being closed, if any."""
    why = f"{closing} is being closed, which waits for its drive" if closing else "the model that is open is in use"
    return Refusal(503, f"{why}; try again later", code="model_busy", retry_after_s=30)


def _without_folder(error: EdgeRunError, entry: ModelEntry) -> EdgeRunError:
    return dataclasses.replace(error, message=without_folder(error.message, entry.path))
