"""A device's part in other devices' runs: it opens slices when it is ordered to, and runs passes as they come.

Orders come through the mesh, one at a time, on a thread of the mesh's; batches and activations come over the data link,
to a thread of the worker's own, which computes. A worker runs only models that lie in its own folders, under its own
budget, and only for the coordinator whose epoch is the latest.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.errors import Cancelled, DeviceLost, EdgeRunError, MeshError, ProtocolError
from edge_run.base.fields import MOST_RATE, MOST_WORDS, Fields, plain, shown
from edge_run.base.mesh import Document, Mesh, Message
from edge_run.base.results import to_json
from edge_run.devices.host.ledger import Ledger
from edge_run.devices.host.memory import default_budget_bytes
from edge_run.runtime.mesh.activation_coding import ActivationCoder
from edge_run.runtime.mesh.commands import carry_out
from edge_run.runtime.mesh.failover import ATTEMPT_BITS, MOST_ATTEMPT
from edge_run.runtime.mesh.links import MEASURE_TIMEOUT_S, measure_links, measured_document
from edge_run.runtime.mesh.messages import Command, Decode, Operate, read_command
from edge_run.runtime.mesh.offers import config_from, layout_hash, most_waiting_bytes, read_settings, room_document
from edge_run.runtime.mesh.transport import SEND_TIMEOUT_S, LinkTransport, code_of
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.runtime.slices.slice import NotNumbers, Share
from edge_run.runtime.worker.files import MOST_PROVIDERS, WorkerFiles
from edge_run.runtime.worker.models import read_asked
from edge_run.runtime.worker.run import WorkerRun

logger = logging.getLogger(__name__)

IDLE_POLL_S = 0.1
TELL_EVERY_S = 0.5
STOP_TIMEOUT_S = 30.0
MOST_NODES, MOST_FRESH_S = 256, 1e6
UNREACHED = "it is not reached"  # why not would tell who named the address which ports are open there


class Worker:
    """Serves a mesh until it is closed. Its thread computes; `handle` is called by the mesh."""

    def __init__(
        self,
        mesh: Mesh,
        folders: Sequence[Path],
        config: ModelConfig,
        fetch_bytes: int = 0,
    ) -> None:
        """Serve the models in `folders` (files, or folders of files) under the budget and settings of `config`.

        fetch_bytes: of its disk, for layers of models that it lacks, which it fetches from others; 0: none.
        """
        self._mesh, self._config = mesh, config
        self._files = WorkerFiles(mesh.link, folders, config, fetch_bytes)
        self._engine: SliceEngine | None = None
        self._opened: tuple[str, Document] | None = None
        self._run: WorkerRun | None = None
        self._changing = threading.Condition()
        self._is_closed = self._is_busy = False
        self._latest = 0
        self._given_up: tuple[str, int] | None = None  # whose run, under which epoch: he may not know yet
        self._tell_s = 0.0
        self._thread = threading.Thread(target=self._serve, name="edge-run-worker", daemon=True)

    def start(self) -> None:
        """Announce what is here, and begin to serve."""
        self._mesh.link.overhear(self._overhear)
        memory_bytes = int(self._config.memory or default_budget_bytes(Ledger().promised_bytes))
        self._mesh.announce({"memory_bytes": memory_bytes, **self._files.capabilities})
        self._thread.start()
        self._files.start()
        self._mesh.serve(self.handle)

    def close(self) -> None:
        """Stop what runs, free the model, and join the thread. Idempotent; the mesh is not closed."""
        self._is_closed = True
        self._end_run()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)
        self._close_engine()
        self._files.close()

    @property
    def status(self) -> Document:
        """What this worker does: the model, the epoch, and where in a pass it is."""
        run, opened = self._run, self._opened
        return {
            "model": opened[0] if opened else None,
            "epoch": run.epoch if run else 0,
            "number": run.transport.number if run else 0,
            "place": run.transport.place if run else "idle",
            "fetch": self._files.status,
        }

    def handle(self, coordinator: str, epoch: int, order: Document) -> Document:
        """Carry out an order, and answer it. Raises EdgeRunError with what to say when it is refused."""
        fields = Fields(order, "an order", coordinator)
        what = fields.name("order")
        if what == "status":
            return self.status
        if what == "measure":
            return self._measure(fields)
        if what == "prepare":
            return self._prepare(coordinator, fields)
        if what == "fetch":
            return self._fetch(fields)
        if what == "assign":
            return self._assign(coordinator, epoch, fields)
        if what == "close":
            self._end_run()
            self._close_engine()
            return {}
        raise ProtocolError(f"order {shown(what)}: unknown here; the devices have different versions")

    def _measure(self, order: Fields) -> Document:
        """Measure the links from here to other devices."""
        nodes, fresh_s = order.names("nodes", 0, MOST_NODES), order.number("fresh_s", 0.0, MOST_FRESH_S)
        return measured_document(measure_links(self._mesh, nodes, MEASURE_TIMEOUT_S, fresh_s), UNREACHED)

    def _prepare(self, coordinator: str, order: Fields) -> Document:
        """Open the model that is asked for, as far as can be without knowing what of it will be computed here."""
        asked, settings = read_asked(order), read_settings(order)
        config = config_from(settings, self._config)
        self._end_run()
        self._mesh.link.watch(coordinator)  # connecting takes a moment, which it has now
        if self._opened != (asked.model, settings) or self._engine is None or _are_gone(self._engine):
            self._close_engine()
            path, partial = self._files.open(coordinator, asked)
            self._engine = SliceEngine.open(path, config, partial)
            self._opened = asked.model, settings
        else:
            self._engine.release()
        return {**room_document(self._engine), **self._files.lacks(self._engine)}

    def _fetch(self, order: Fields) -> Document:
        """Begin to fetch what the units that `order` says need; `status` says how far it is."""
        engine, share = self._share_of(order)
        self._end_run()
        engine.release()
        return self._files.fetch(engine, share, order.names("providers", 0, MOST_PROVIDERS))

    def _share_of(self, order: Fields) -> tuple[SliceEngine, Share]:
        """Return the open model, and this device's share of it that `order` says."""
        engine = self._engine
        if engine is None:
            raise MeshError("no model is open here; prepare comes first")
        if _are_gone(engine):
            raise MeshError(f"{engine.gguf.shards[0].path}: was deleted meanwhile; the next run opens the model anew")
        if order.name("layout") != layout_hash(engine.layout):
            raise MeshError("the model is cut in other places here; the devices have different versions")
        n_units = len(engine.layout.units)
        return engine, Share(order.names("owners", n_units, n_units), self._mesh.node)

    def _assign(self, coordinator: str, epoch: int, order: Fields) -> Document:
        """Compute the units that `order` says, under a new epoch."""
        engine, share = self._share_of(order)
        number, speeds = order.integer("epoch", most=MOST_ATTEMPT), order.numbers("bytes_per_s", 0.0, MOST_RATE)
        if number >> ATTEMPT_BITS > epoch or number <= self._latest:
            raise ProtocolError(f"an order of epoch {number}, after one of {self._latest}: not the latest")
        self._latest = number
        self._end_run()
        self._files.check(engine, share)
        coder = ActivationCoder(
            engine.config.mesh_activations, {node: max(1.0, speed) for node, speed in speeds.items()}
        )
        room_bytes = most_waiting_bytes(engine)
        run = WorkerRun(
            coordinator,
            lambda check: LinkTransport(
                self._mesh.link, number, share.owners, share.node, coder, check, most_waiting_bytes=room_bytes
            ),
        )
        run.transport.forget()
        engine.assign(share, run.transport)
        with self._changing:
            self._run = run
            self._changing.notify_all()
        self._mesh.link.watch(coordinator)  # it may be lost before it says a word
        logger.info("epoch %d: units %s of %s", number, share.ranges, engine.gguf.shards[0].path)
        return {"plan": to_json(engine.plan), "layers": len(share.ranges)}

    def _end_run(self) -> None:
        """Stop the pass in progress, and wait until the thread is out of it."""
        with self._changing:
            if self._run:
                self._run.end()
            self._run = self._given_up = None
            if self._is_busy and self._engine:
                self._engine.interrupt.cancel()
            if threading.current_thread() is not self._thread and not self._changing.wait_for(
                lambda: not self._is_busy, STOP_TIMEOUT_S
            ):
                raise MeshError(f"the pass in progress did not stop in {STOP_TIMEOUT_S:.0f} s")

    def _overhear(self, item: Message | DeviceLost) -> None:
        """Stop the pass in progress at once when what comes ends it; it is received afterwards as ever."""
        run, engine = self._run, self._engine
        if run is not None and engine is not None and run.is_ended_by(item):
            engine.interrupt.cancel()

    def _close_engine(self) -> None:
        engine, self._engine, self._opened = self._engine, None, None
        if engine:
            engine.close()
        self._files.release()

    def _serve(self) -> None:
        while not self._is_closed:
            with self._changing:
                self._changing.wait_for(lambda: self._run is not None or self._is_closed, IDLE_POLL_S)
                run = self._run
                self._is_busy = run is not None
            if run is None:
                self._tell_that_it_is_over()
                continue
            try:
                self._step(run)
            except DeviceLost as error:
                if error.node == run.coordinator:
                    self._give_up(run)
            except EdgeRunError as error:
                logger.warning("%s", error)
            except Exception:
                logger.exception("a mistake of ours; the run is given up")
                self._give_up(run)
            finally:
                with self._changing:
                    self._is_busy = False
                    self._changing.notify_all()

    def _give_up(self, run: WorkerRun) -> None:
        """The coordinator is gone: what was decoded is nobody's, and its weights need not stay."""
        run.end()
        self._given_up = run.coordinator, run.epoch
        with self._changing:
            if self._run is run:
                self._run = None
        if self._engine:
            self._engine.release()

    def _tell_that_it_is_over(self) -> None:
        """Tell a coordinator whose run was given up here, as soon as it is there again: it may be waiting."""
        if self._given_up is None or time.monotonic() < self._tell_s:
            return
        (node, epoch), self._tell_s = self._given_up, time.monotonic() + TELL_EVERY_S
        with contextlib.suppress(EdgeRunError):
            self._mesh.link.send(node, {"kind": "over", "epoch": epoch}, timeout_s=IDLE_POLL_S)
            self._given_up = None

    def _step(self, run: WorkerRun) -> None:
        """Carry out the next command, if one comes."""
        message = run.transport.command(IDLE_POLL_S)
        engine = self._engine
        if message is None or engine is None or run.is_over:
            return
        fields = Fields(message.header, "a command", message.node)
        kind, number = fields.name("kind"), fields.integer("number")
        if kind == "stop":
            self._undo(run, engine, number)
        elif kind == "command":
            try:
                self._last = read_command(message, engine.decoder.limits)
                engine.interrupt.reset()
                run.begin(number)
                carry_out(engine, self._last)
            except Cancelled:
                raise
            except DeviceLost as error:  # the coordinator cannot know that an activation went nowhere
                if error.node != run.coordinator:
                    self._report(run, number, error)
                raise
            except EdgeRunError as error:
                self._report(run, number, error)
            finally:
                run.transport.finish()

    def _undo(self, run: WorkerRun, engine: SliceEngine, number: int) -> None:
        """Take back a batch that was stopped when this device was done with it already."""
        if run.done == number and isinstance(self._last, Decode):
            engine.decoder.take_back(self._last.batch)
            self._last = Operate("clear")

    def _report(self, run: WorkerRun, number: int, error: EdgeRunError) -> None:
        """Tell the coordinator that this device cannot do its part, or which other device keeps it from that."""
        other = error.node if isinstance(error, DeviceLost | ProtocolError | NotNumbers) else ""
        is_lost = isinstance(error, DeviceLost)
        header: Document = {
            "kind": "failed",
            "epoch": run.epoch,
            "number": number,
            "code": code_of(error),
            "why": UNREACHED if is_lost else plain(error.message, MOST_WORDS),
            "lost": other if is_lost else "",
            "blames": other if isinstance(error, ProtocolError | NotNumbers) else "",
        }
        logger.warning("%s", error)
        self._mesh.link.send(run.coordinator, header, timeout_s=SEND_TIMEOUT_S)

    _last: Command = Operate("clear")


def _are_gone(engine: SliceEngine) -> bool:
    """Return whether files of an open model were deleted."""
    return not all(shard.path.exists() for shard in engine.gguf.shards)
