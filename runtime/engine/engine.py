"""The engine: llama.cpp computing on memory that we own, inside a budget.

Opening a model loads no weights. llama.cpp loads a stub, and its context is made and measured (`loading.py`). A pass
that computes nothing shows which weights are read when. From this follows the plan: which chunks are pinned, which
stream, and through how many frames (`supply.py`). Then the readers start, and the first pass waits for them segment by
segment, like every other pass (`passes.py`).

A model that fits is read as a whole and computed without a callback, by llama.cpp at full speed. Where page frames
cannot be moved, or the installed llama.cpp is an unknown version, llama.cpp's own loader runs the model, and
`Stats.backend` says why.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from edge_run.base.config import ModelConfig
from edge_run.base.errors import system_errors
from edge_run.base.interrupt import Interrupt
from edge_run.base.mesh_status import MeshUse
from edge_run.base.profile import DeviceProfile
from edge_run.base.protocols import Decoder
from edge_run.base.results import ExpertUse, KvKeep, KvSpill, MemoryUse, Numerics, Plan
from edge_run.devices.host.ledger import Ledger
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.decoding.driver import Driver
from edge_run.runtime.decoding.embedder import Embedder
from edge_run.runtime.engine.loading import Loaded, load
from edge_run.runtime.engine.passes import Passes
from edge_run.runtime.engine.supply import open_supply
from edge_run.runtime.graph.flow import Flow
from edge_run.runtime.llama._ggml import rest_threads
from edge_run.runtime.llama.backend_choice import check_library_known
from edge_run.runtime.planning.offload_times import note_paces, part_of
from edge_run.runtime.planning.prepare import prepare
from edge_run.runtime.planning.prepared import Prepared
from edge_run.runtime.processes.forks import forkable_lock
from edge_run.runtime.streaming.chosen_rows import ChosenRows
from edge_run.runtime.streaming.route_recorder import RouteRecorder
from edge_run.tiers.gguf import GgufModel, read_gguf
from edge_run.tiers.readers import ReadTotals

_OPENING = forkable_lock()  # one at a time: what an opening holds is what the whole process grew by


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause the garbage collector, which would go through all plans and tables many times during an opening."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def one_opening() -> Iterator[None]:
    """Let no other opening in this process run in this block; another thread may compute what was opened, at once."""
    with _OPENING, garbage_collection_paused():
        try:
            yield
        finally:
            rest_threads()


class Supplied(Protocol):
    """The figures of an open model's weights on this device."""

    @property
    def plan(self) -> Plan:
        """What goes where."""
        ...

    @property
    def read_totals(self) -> ReadTotals:
        """What the readers read so far."""
        ...

    @property
    def wait_s(self) -> float:
        """Seconds that passes have waited for weights so far."""
        ...

    @property
    def expert_use(self) -> ExpertUse | None:
        """How a mixture of experts was streamed so far; None where nothing streams by expert."""
        ...

    @property
    def kv_spill(self) -> KvSpill | None:
        """What of keys and values went to a file so far; None where all stay in memory."""
        ...


class MeshFront(Decoder, Protocol):
    """The decoder of a model that is spread over several devices."""

    @property
    def use(self) -> MeshUse:
        """How the model is spread."""
        ...


class Engine:
    """An open model: its decoder, its plan, its figures. One pass at a time; closing is idempotent."""

    def __init__(
        self,
        loaded: Loaded,
        supplied: Supplied,
        passes: Passes,
        stack: contextlib.ExitStack,
        started_s: float,
        mesh: MeshFront | None = None,
    ) -> None:
        """Make an engine from its parts; `Engine.open` opens one on this device.

        supplied: the figures of the weights.
        stack: frees everything on closing.
        started_s: when the opening began.
        mesh: the decoder of a model that is spread over several devices.
        """
        self._loaded, self._supplied, self._passes, self._mesh = loaded, supplied, passes, mesh
        prepared = loaded.prepared
        self.gguf, self.config, self.budget_bytes = prepared.gguf, prepared.config, prepared.budget_bytes
        self.offload, self._profile = prepared.offload, prepared.profile
        self.model, self.draft, self.shape, self.backend = loaded.model, loaded.draft, loaded.shape, loaded.backend
        self.decoder, self.timeline = passes.decoder, passes.timeline
        if self._profile:
            self.expect(self._profile)
        self._stack = stack.pop_all()
        self.load_s = time.monotonic() - started_s

    @classmethod
    @system_errors("opening the model")
    def open(
        cls,
        path: Path,
        config: ModelConfig,
        recorder: RouteRecorder | None = None,
        *,
        gguf: GgufModel | None = None,
        may_be_whole: bool = True,
        interrupt: Interrupt | None = None,
    ) -> Engine:
        """Open the model at `path`; when this returns, reading has begun, and nothing waits for it.

        recorder: takes part in every pass.
        gguf: the headers of `path`, if they were read already.
        may_be_whole: whether a model that fits is read as a whole and computed without a callback.
        interrupt: ends the work at hand, and the opening too.

        Raises Cancelled, ModelFileError, BudgetError, KernelError, ConfigError, NotSupported or TierReadError; then
        nothing is left open.
        """
        started_s, ledger = time.monotonic(), Ledger()
        with garbage_collection_paused():
            gguf = gguf or read_gguf(path)
        if recorder:
            check_library_known("a recording of experts")
        prepared = prepare(gguf, config, ledger)
        driver = Driver(interrupt)
        driver.interrupt.check()
        driver.features += [recorder] if recorder else []
        with contextlib.ExitStack() as stack:
            with one_opening():
                loaded = load(prepared, driver, stack, may_be_whole=may_be_whole and not config.kv_keep)
                supply = open_supply(loaded, ledger, stack, recorder)
                passes = Passes(loaded, lambda: supply)
                stack.callback(passes.decoder.close)
            driver.interrupt.check()
            return cls(loaded, supply, passes, stack, started_s)

    @property
    def plan(self) -> Plan:
        """What goes where on this device."""
        return self._supplied.plan

    @property
    def numerics(self) -> Numerics:
        """The numerics key of this engine."""
        return self._loaded.numerics

    @property
    def memory_use(self) -> MemoryUse:
        """What the process holds, against its budget."""
        plan, peak_bytes = self.plan, process_memory().peak_bytes
        return MemoryUse(plan.budget_bytes, peak_bytes, plan.pinned_bytes, plan.window_bytes, plan.kv_bytes)

    @property
    def interrupt(self) -> Interrupt:
        """The interrupt that ends the work at hand."""
        return self._loaded.driver.interrupt

    @property
    def context_tokens(self) -> int:
        """The tokens that llama.cpp's context has cells for, in which no more may fit the budget."""
        return self._loaded.context.context_tokens

    def flow(self) -> Flow:
        """Return the data flow of a pass of one token, which is not computed. Nothing may have been decoded yet."""
        self.decoder.map_graph(notes_nodes=False)
        return self._loaded.driver.take_flow()

    @property
    def front(self) -> Decoder:
        """The decoder that answers are generated with."""
        return self._mesh or self.decoder

    @property
    def embedder(self) -> Embedder | None:
        """What vectors of texts are computed with; None where the model was opened to generate text."""
        loaded = self._loaded
        return Embedder(loaded.model, loaded.context, self.decoder, loaded.shape) if loaded.shape.pooling else None

    @property
    def mesh_use(self) -> MeshUse | None:
        """How the model is spread over several devices; None on one device."""
        return self._mesh.use if self._mesh else None

    @property
    def read_totals(self) -> ReadTotals:
        """What the readers read so far."""
        return self._supplied.read_totals

    @property
    def wait_s(self) -> float:
        """Seconds that passes have waited for weights so far."""
        return self._supplied.wait_s

    @property
    def expert_use(self) -> ExpertUse | None:
        """How a mixture of experts was streamed so far; None where nothing streams by expert."""
        return self._supplied.expert_use

    @property
    def kv_spill(self) -> KvSpill | None:
        """What of keys and values went to a file so far; None where all stay in memory."""
        return self._supplied.kv_spill

    @property
    def kv_keep(self) -> KvKeep | None:
        """What attention looked at so far; None where that is everything."""
        return next((one.figures for one in self._loaded.driver.features if isinstance(one, ChosenRows)), None)

    @property
    def prepared(self) -> Prepared:
        """What was known of the file when it was opened."""
        return self._loaded.prepared

    def expect(self, profile: DeviceProfile) -> None:
        """Report progress in seconds, expected from `profile`; on a mesh, progress is reported in shares."""
        if profile != self._profile:
            self._profile = None  # what tokens take is held against another forecast from here on
        if self._mesh is None:
            self._passes.expect(profile)

    def tell(self, say: Callable[[str], None]) -> None:
        """Have `say` told, in a line, what cannot be done and is gone on without."""
        self._passes.tell(say)

    def before_closing(self, action: Callable[[], object]) -> None:
        """Have `action` done first when this is closed."""
        self._stack.callback(action)

    def close(self) -> None:
        """Stop the readers and free everything. Idempotent."""
        self._stack.close()
        profile, self._profile = self._profile, None
        if profile and not profile.is_disturbed:
            note_paces(self.gguf, self.config.cache, part_of(self.offload), self.timeline.paces)
