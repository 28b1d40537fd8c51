"""What a batch has on each worker of a Dask cluster: a model, opened once, that many tasks share.

A task waits for a place among the answers of its worker's model, and then leaves the worker's threads (`secede`), so
that as many are answered at once as share a pass, whatever number of threads the worker was started with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal
from distributed import Worker, WorkerPlugin, get_worker, secede

import edge_run
from edge_run.base.config import ModelConfig
from edge_run.base.error_codes import error_document
from edge_run.base.errors import ConfigError, EdgeRunError, NotSupported, flags_of_options, options_as_flags
from edge_run.base.options import make_config
from edge_run.base.sampling_config import SamplingConfig
from edge_run.base.units import format_size
from edge_run.runtime.batches.answering import BatchResult, PlacesHere
from edge_run.runtime.batches.input_file import BatchRequest

MEMORY_SHARE = 0.75  # of a worker's limit, at 0.8 of which Dask gives it nothing more to do
GONE = {"is_gone": True}
"""What a task returns whose worker has no open model: the request has to go elsewhere, or the model to be opened."""


class ModelHost(WorkerPlugin):
    """A model on a worker. Registered once for a cluster; each worker has a copy, those that come later too.

    order: what to open and how, as JSON has it, so that workers of another version can say so.
    """

    idempotent = True

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.order = order
        self.name = "edge-run-" + hashlib.sha256(json.dumps(order, sort_keys=True).encode()).hexdigest()[:16]

    def setup(self, worker: Worker) -> None:
        """Note whose plugin this is. The model is opened by a task, for which clusters that adapt keep the worker."""
        self._worker = worker
        self._changing = threading.Lock()
        self._closing = contextlib.ExitStack()
        self._portal: BlockingPortal | None = None
        self._is_closed = False
        self._running: dict[Any, Future[BatchResult]] = {}

    def open(self) -> dict[str, Any]:
        """Open the model, where it is not open; return how many requests have a place, or the error."""
        try:
            with self._changing:
                if self._is_closed:
                    return GONE
                if self._portal is None:
                    self._open()
        except EdgeRunError as error:
            return {"failure": error_document(error)}
        return {"most": self._places.most}

    def answer(self, key: Any, request: bytes) -> dict[str, Any]:
        """Answer a request, in a thread of the worker, which it leaves as soon as it has a place."""
        portal, has_place = self._portal, threading.Event()
        if portal is None:
            return GONE

        async def in_turn() -> BatchResult:
            place = await self._places.take(0)
            has_place.set()
            return await place(msgspec.json.decode(request, type=BatchRequest))

        try:
            future = self._running[key] = portal.start_task_soon(in_turn, name="edge-run-answer")
        except RuntimeError:  # it was closed meanwhile
            return GONE
        if self._portal is not portal:  # and so it was, without this task
            future.cancel()
        try:
            future.add_done_callback(lambda _: has_place.set())
            has_place.wait()
            secede()
            result = future.result()
        except CancelledError:
            return GONE
        except EdgeRunError as error:
            return {"failure": error_document(error)}
        finally:
            self._running.pop(key, None)
        body = result.body if isinstance(result.body, bytes) else msgspec.json.encode(result.body)
        return {"status": result.status, "body": body, "n_tokens": result.n_tokens}

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        """End the answer of a task that nobody waits for any more."""
        if finish not in ("executing", "long-running") and (future := self._running.get(key)):
            future.cancel()

    async def teardown(self, worker: Worker) -> None:
        """Close the model."""
        await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        with self._changing:
            self._portal, self._is_closed = None, True
            for future in list(self._running.values()):
                future.cancel()
            self._closing.close()

    def _open(self) -> None:
        from edge_run.runtime.generation.model import Model

        order = self.order
        if order["version"] != edge_run.__version__:
            raise NotSupported(
                f"edge-run {edge_run.__version__} is installed here and {order['version']} where the batch was "
                "started; install the same on both"
            )
        with contextlib.ExitStack() as opening:
            if (flags := order["flags"]) is not None:
                opening.enter_context(options_as_flags(lambda: flags))
            config = make_config(ModelConfig, {**order["options"], "memory": self._memory(order["options"]["memory"])})
            sampling = make_config(SamplingConfig, order["sampling"])
            model = opening.enter_context(
                Model(Path(order["model"]), config=config, chat_template=order["chat_template"])
            )
            portal = opening.enter_context(start_blocking_portal())
            places = portal.wrap_async_context_manager(PlacesHere.of(model, sampling, order["most_tokens"]))
            self._places = opening.enter_context(places)
            self._closing = opening.pop_all()
        self._portal = portal

    def _memory(self, asked_bytes: int | None) -> int | None:
        """Return the budget: what was asked for, or what Dask lets this worker have. Raises ConfigError."""
        limit_bytes = self._worker.memory_manager.memory_limit
        if not limit_bytes:
            return asked_bytes
        room_bytes = int(MEMORY_SHARE * limit_bytes)
        if asked_bytes and asked_bytes > room_bytes:
            raise ConfigError(
                f"a budget of {format_size(asked_bytes)}: the worker may have {format_size(limit_bytes)}, of which "
                f"{format_size(room_bytes)} at most are for a model; start it with another --memory-limit (0 for none)"
            )
        return asked_bytes or room_bytes


def order_of(
    model: Path, config: ModelConfig, sampling: SamplingConfig, chat_template: str | None, most_tokens: int | None
) -> dict[str, Any]:
    """Return what a `ModelHost` is told, as JSON has it. The model, and what else lies in files, is each worker's.

    flags: how messages name options here.
    """

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    return {
        "version": edge_run.__version__,
        "model": str(model),
        "options": {name: plain(value) for name, value in dataclasses.asdict(config).items()},
        "sampling": dataclasses.asdict(sampling),
        "chat_template": chat_template,
        "most_tokens": most_tokens,
        "flags": flags_of_options(),
    }


def open_model(name: str) -> dict[str, Any]:
    """Open the model of the worker that this runs on: a task."""
    host = get_worker().plugins.get(name)
    secede()
    return host.open() if isinstance(host, ModelHost) else GONE


def answer(name: str, request: bytes) -> dict[str, Any]:
    """Answer a request with the model of the worker that this runs on: a task."""
    worker = get_worker()
    host = worker.plugins.get(name)
    return host.answer(worker.get_current_task(), request) if isinstance(host, ModelHost) else GONE
