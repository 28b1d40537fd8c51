"""A device's part in the runs of other devices: opens slices when it is ordered to, and runs passes as they come.

Orders come through the mesh, one at a time, on a thread of the mesh, and are carried out here. Batches and activations
come over the data link, to the worker's own thread, which computes (`run_thread.py`). A worker runs only models that
lie in its own folders, under its own budget, and only for the coordinator with the latest epoch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from edge_run.base.config import ModelConfig
from edge_run.base.errors import Cancelled, MeshError, ModelFileError, ProtocolError, system_errors
from edge_run.base.fields import MOST_RATE, Document, Fields, shown
from edge_run.base.interrupt import Interrupt
from edge_run.base.mesh import Mesh
from edge_run.base.strict_json import to_json
from edge_run.devices.host.ledger import Ledger
from edge_run.devices.host.memory import default_budget_bytes
from edge_run.runtime.mesh.activation_coding import ActivationCoder
from edge_run.runtime.mesh.failover import ATTEMPT_BITS, MOST_ATTEMPT
from edge_run.runtime.mesh.fetch import MOST_PROVIDERS
from edge_run.runtime.mesh.links import MEASURE_TIMEOUT_S, measure_links, measured_document
from edge_run.runtime.mesh.offers import (
    IN_FLIGHT,
    OTHER_VERSIONS,
    config_from,
    layout_hash,
    most_waiting_bytes,
    read_settings,
    room_document,
)
from edge_run.runtime.mesh.transport import LinkTransport
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.runtime.slices.slice import Share
from edge_run.runtime.worker.files import WorkerFiles
from edge_run.runtime.worker.models import read_asked
from edge_run.runtime.worker.run import WorkerRun
from edge_run.runtime.worker.run_thread import UNREACHED, RunThread

logger = logging.getLogger(__name__)

NO_MORE_PART = "this device takes no more part"
MOST_NODES, MOST_FRESH_S = 256, 1e6
ORPHAN_S = 60.0  # more than a coordinator may be away for and find its lease again


class Worker:
    """Serves a mesh until it is closed. `handle` is called by the mesh, for one order at a time."""

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
        self._latest = 0  # epoch of an order to compute
        self._at_work, self._is_closed = threading.Lock(), False
        self._interrupt = Interrupt()  # of the order at hand
        self._runs = RunThread(mesh.link, mesh.report, self._free_orphan)
        self._owner: tuple[str, str] | None = None  # of the open model: the device that had it opened, this start of it
        self._owner_seen_s, self._watched = 0.0, ""

    def start(self) -> None:
        """Announce what is here, and begin to serve."""
        memory_bytes = int(self._config.memory or default_budget_bytes(Ledger().promised_bytes))
        self._mesh.announce({"memory_bytes": memory_bytes, **self._files.capabilities})
        self._runs.start()
        self._files.start()
        self._mesh.serve(self.handle)

    def close(self) -> None:
        """Stop what runs, free the model, and join the thread. Idempotent; the mesh is not closed.

        An order at hand is broken off where it can be, and else carried out before that.
        """
        self._is_closed = True
        self._interrupt.cancel()
        with self._at_work:
            self._runs.close()
            self._close_engine()
            self._files.close()

    @property
    def status(self) -> Document:
        """What this worker does: the model, the epoch, and where in a pass it is."""
        run, opened = self._runs.run, self._opened
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
        orders = {
            "status": lambda: self.status,
            "measure": lambda: self._measure(fields),
            "prepare": lambda: self._prepare(coordinator, fields),
            "fetch": lambda: self._fetch(fields),
            "assign": lambda: self._assign(coordinator, epoch, fields),
            "close": self._end,
        }
        if what not in orders:
            raise ProtocolError(f"order {shown(what)}: unknown here; {OTHER_VERSIONS}")
        with self._at_work:
            self._interrupt = Interrupt()
            if self._is_closed:
                raise MeshError(NO_MORE_PART)
            try:
                with system_errors("carrying out an order"):
                    return orders[what]()
            except Cancelled as error:
                raise MeshError(NO_MORE_PART) from error

    def _measure(self, order: Fields) -> Document:
        """Measure the links from here to other devices."""
        nodes, fresh_s = order.names("nodes", 0, MOST_NODES), order.number("fresh_s", 0.0, MOST_FRESH_S)
        return measured_document(measure_links(self._mesh, nodes, MEASURE_TIMEOUT_S, fresh_s), UNREACHED)

    def _prepare(self, coordinator: str, order: Fields) -> Document:
        """Open the model that is asked for, as far as can be without knowing what of it will be computed here."""
        asked, settings = read_asked(order), read_settings(order)
        config = config_from(settings, self._config)
        self._runs.end()
        self._owner = next(((m.node, m.incarnation) for m in self._mesh.members() if m.node == coordinator), None)
        self._owner_seen_s = time.monotonic()
        self._watch(coordinator)  # connecting takes a moment, which it has now
        if self._opened != (asked.model, settings) or self._engine is None or _are_void(self._engine):
            self._close_engine()
            if reading := self._files.look_for(asked):
                return {"reading": reading}  # and is asked again
            path, partial = self._files.open(coordinator, asked, self._interrupt.check)
            in_flight = cast("int", settings[IN_FLIGHT])
            with contextlib.ExitStack() as undo:
                undo.callback(self._files.release)  # else no other process could compute with what was fetched
                self._engine = SliceEngine.open(
                    path, config, partial, most_in_flight=in_flight, interrupt=self._interrupt
                )
                undo.pop_all()
            self._opened = asked.model, settings
        else:
            self._engine.release()
        return {**room_document(self._engine), **self._files.lacks(self._engine)}

    def _fetch(self, order: Fields) -> Document:
        """Begin to fetch what the units that `order` says need; `status` says how far it is."""
        engine, share = self._share_of(order)
        self._runs.end()
        engine.release()
        return self._files.fetch(engine, share, order.names("providers", 0, MOST_PROVIDERS))

    def _share_of(self, order: Fields) -> tuple[SliceEngine, Share]:
        """Return the open model, and this device's share of it that `order` says."""
        engine = self._engine
        if engine is None:
            raise MeshError("no model is open here; prepare comes first")
        if _are_void(engine):
            path = engine.gguf.shards[0].path
            raise MeshError(f"{path}: was deleted, or written to, meanwhile; the next run opens the model anew")
        if order.name("layout") != layout_hash(engine.layout):
            raise MeshError(f"the model is cut in other places here; {OTHER_VERSIONS}")
        n_units = len(engine.layout.units)
        return engine, Share(order.names("owners", n_units, n_units), self._mesh.node, order.flag("is_split"))

    def _assign(self, coordinator: str, epoch: int, order: Fields) -> Document:
        """Compute the units that `order` says, under a new epoch."""
        engine, share = self._share_of(order)
        number, speeds = order.integer("epoch", most=MOST_ATTEMPT), order.numbers("bytes_per_s", 0.0, MOST_RATE)
        if number >> ATTEMPT_BITS > epoch or number <= self._latest:
            raise ProtocolError(f"an order of epoch {number}, after one of {self._latest}: not the latest")
        self._latest = number
        self._runs.end()
        self._files.check(engine, share)
        coder = ActivationCoder(
            engine.config.mesh_activations, {node: max(1.0, speed) for node, speed in speeds.items()}
        )
        room_bytes = most_waiting_bytes(engine)
        run = WorkerRun(
            coordinator,
            engine,
            lambda check: LinkTransport(self._mesh.link, number, share, coder, check, room_bytes),
            self._files.model,
        )
        run.transport.forget()
        engine.assign(share, run.transport)
        self._runs.begin(run)
        self._watch(coordinator)  # it may be lost before it says a word
        logger.info("epoch %d: units %s of %s", number, share.ranges, engine.gguf.shards[0].path)
        return {"plan": to_json(engine.plan), "layers": len(share.ranges)}

    def _end(self) -> Document:
        """Stop what runs, and free the model."""
        self._runs.end()
        self._close_engine()
        self._files.stop_search()
        self._watch("")
        return {}

    def _watch(self, coordinator: str) -> None:
        """Have the end of `coordinator` told as a loss from now on, and no more that of the one before. Empty: none."""
        before, self._watched = self._watched, coordinator
        if before and before != coordinator:
            self._mesh.link.unwatch(before)
        if coordinator:
            self._mesh.link.watch(coordinator)

    def _free_orphan(self) -> None:
        """Close a model that no run uses once the device that had it opened is gone for some time, or started anew."""
        if self._engine is None:
            return
        if self._owner in [(member.node, member.incarnation) for member in self._mesh.members()]:
            self._owner_seen_s = time.monotonic()
        elif self._is_orphan and self._at_work.acquire(blocking=False):
            try:
                if self._runs.run is None and self._is_orphan:
                    self._close_engine()
            finally:
                self._at_work.release()

    @property
    def _is_orphan(self) -> bool:
        """Whether nobody was there for long that the open model is for, since a run of it ended."""
        return time.monotonic() - max(self._owner_seen_s, self._runs.ended_s) > ORPHAN_S

    def _close_engine(self) -> None:
        engine, self._engine, self._opened = self._engine, None, None
        if engine:
            engine.close()
        self._files.release()


def _are_void(engine: SliceEngine) -> bool:
    """Return whether files of an open model were deleted, or written to since they were opened: no pass is computed."""
    try:
        for source in engine.loaded.backing.sources if engine.loaded.backing else ():
            source.check_unchanged()
    except ModelFileError:
        return True
    return not all(shard.path.exists() for shard in engine.gguf.shards)
