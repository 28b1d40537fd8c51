"""An engine that computes some units of a model: the rest is neither read nor kept, and takes no memory.

It opens like any other up to the graph map; what it computes is said afterwards, and may be said anew: then weights are
given up, and others are read, while llama.cpp's model and context stay.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial as bound
from pathlib import Path

from edge_run.base.config import PACKED_OFF, ModelConfig
from edge_run.base.errors import NotSupported, system_errors
from edge_run.base.interrupt import Interrupt
from edge_run.base.protocols import Logits
from edge_run.base.results import ExpertUse, KvSpill, Plan
from edge_run.base.units import round_down, round_up
from edge_run.devices.host.ledger import Ledger
from edge_run.partition.mesh_pipeline import MOST_IN_FLIGHT
from edge_run.runtime.decoding.driver import ONE_TOKEN, Driver, PassShape
from edge_run.runtime.decoding.narrow_pass import touched_bytes
from edge_run.runtime.engine.choosing import chooser_of
from edge_run.runtime.engine.engine import garbage_collection_paused, one_opening
from edge_run.runtime.engine.lending import open_lender
from edge_run.runtime.engine.loading import Loaded, WeightBacking, load
from edge_run.runtime.engine.passes import Passes
from edge_run.runtime.engine.spilling import open_spill
from edge_run.runtime.engine.supply import Begun, Supply
from edge_run.runtime.graph.units import Layout
from edge_run.runtime.llama.holdings import COORDINATOR_RESERVE_BYTES, WORKER_RESERVE_BYTES, book_bytes
from edge_run.runtime.planning.memory_plan import make_plan
from edge_run.runtime.planning.prepare import prepare
from edge_run.runtime.slices.assignment import Assignment
from edge_run.runtime.slices.maps import SliceMaps
from edge_run.runtime.slices.slice import Share, Transport, own_part
from edge_run.runtime.slices.slice_terms import slice_terms
from edge_run.runtime.streaming.assemble import WeightMemory, open_streams
from edge_run.tiers import _libc
from edge_run.tiers.gguf import GgufModel, read_gguf
from edge_run.tiers.kv.loans import idle_bytes
from edge_run.tiers.partial import PartialModel
from edge_run.tiers.readers import Readers, ReadTotals


class SliceEngine:
    """An open model of which this device computes a share. Until `assign` it computes nothing.

    loaded: what llama.cpp has of it. maps: its graphs. holdings: what the process held when the model was open, and
    nothing was assigned. lendable_bytes: of the buffers, what passes of one token leave to weights. most_in_flight: the
    passes that a run may have here at a time, all but one of which wait.
    """

    def __init__(
        self,
        loaded: Loaded,
        backing: WeightBacking,
        ledger: Ledger,
        stack: contextlib.ExitStack,
        least_bytes: int,
        most_in_flight: int = 0,
    ) -> None:
        """Map the graph; `SliceEngine.open` opens one. stack: frees all of it. least_bytes: to keep for later."""
        self.loaded, self._backing, self._ledger = loaded, backing, ledger
        prepared = loaded.prepared
        self.gguf, self.config, self.budget_bytes = prepared.gguf, prepared.config, prepared.budget_bytes
        self.shape = loaded.shape
        items = loaded.holdings.items()
        self._idle = Supply(loaded, Begun(make_plan(loaded.terms(loaded.holdings), mode="streamed", items=items)))
        self._supply = self._idle
        self._assignment: Assignment | None = None
        self._past_reads, self._past_wait_s = ReadTotals(), 0.0
        self._past_spill: KvSpill | None = None
        self._assigned = contextlib.ExitStack()
        stack.callback(self._assigned.close)
        self.passes = Passes(loaded, lambda: self._supply)
        self.decoder = self.passes.decoder
        stack.callback(self.decoder.close)
        loaded.context.keep_cores()
        self.maps = SliceMaps(self.decoder, loaded.driver, backing.address_space)
        # Groups of sequences may have passes at the same time, where these look at all cells of the context.
        in_flight = most_in_flight or min(MOST_IN_FLIGHT, self.config.sequences)
        self.most_in_flight = in_flight if self.decoder.capabilities.can_branch else 1
        # Besides the least, for activations on their way, in and out, twice each, for those of passes that wait, and
        # for the books of a long text.
        state_bytes = self.width * max(unit.entry_bytes for unit in self.layout.units)
        reserve_bytes = min(COORDINATOR_RESERVE_BYTES, least_bytes + 4 * state_bytes)
        reserve_bytes += (self.most_in_flight - 1) * state_bytes + book_bytes(self.shape.context_tokens)
        self.holdings = replace(loaded.holdings, reserve_bytes=reserve_bytes)
        is_narrow = loaded.shape.sequences == 1 and not self.config.exact
        buffer = loaded.driver.compute_buffer
        idle = idle_bytes(buffer.size_bytes, touched_bytes(buffer, self.layout.flow))
        self.lendable_bytes = idle if is_narrow else 0
        self._stack = stack.pop_all()

    @classmethod
    @system_errors("opening the model")
    def open(
        cls,
        path: Path,
        config: ModelConfig,
        partial: PartialModel | None = None,
        *,
        gguf: GgufModel | None = None,
        least_reserve_bytes: int = WORKER_RESERVE_BYTES,
        most_in_flight: int = 0,
        interrupt: Interrupt | None = None,
    ) -> SliceEngine:
        """Open the model at `path` and map its graph; no weight is read. Raises as `Engine.open` does.

        partial: of this model only some pieces are there; those that it needs must be before they are assigned.
        most_in_flight: passes of a run at a time; 0: as many as the sequences of `config` have a use for.
        interrupt: as of `Engine.open`. Nothing of it goes to a GPU, and experts are read from the model itself.
        """
        ledger = Ledger()
        with garbage_collection_paused():
            gguf = gguf or read_gguf(path)
        prepared = prepare(gguf, replace(config, gpu_memory=0, packed=PACKED_OFF), ledger, is_slice=True)
        if prepared.why_plain:
            raise NotSupported(f"a mesh needs edge-run's own loader here: {prepared.why_plain}")
        with contextlib.ExitStack() as stack, one_opening():
            driver = Driver(interrupt, is_partial=True)
            loaded = load(prepared, driver, stack, partial=partial, may_be_whole=False)
            assert loaded.backing is not None
            return cls(loaded, loaded.backing, ledger, stack, least_reserve_bytes, most_in_flight)

    @property
    def plan(self) -> Plan:
        """What goes where, of what is assigned."""
        return self._supply.plan

    @property
    def layout(self) -> Layout:
        """The units of this model, in a pass of one token."""
        return self.maps.layout

    @property
    def width(self) -> int:
        """Tokens in one pass at most."""
        return self.shape.micro_batch_tokens

    @property
    def read_totals(self) -> ReadTotals:
        """What the readers read so far, for all that was assigned."""
        return self._past_reads + self._supply.read_totals

    @property
    def wait_s(self) -> float:
        """Seconds that passes have waited for weights so far."""
        return self._past_wait_s + self._supply.wait_s

    @property
    def expert_use(self) -> ExpertUse | None:
        """How a mixture of experts is streamed; None where nothing streams by expert."""
        return self._supply.expert_use

    @property
    def kv_spill(self) -> KvSpill | None:
        """What of the keys and values of its own layers went to files so far; None where all stayed in memory."""
        now, past = self._supply.kv_spill, self._past_spill
        if now is None or past is None:
            return now or past
        return KvSpill(past.written_bytes + now.written_bytes, past.read_bytes + now.read_bytes, now.away_bytes)

    @property
    def interrupt(self) -> Interrupt:
        """What ends the work at hand."""
        return self.loaded.driver.interrupt

    @system_errors("taking a share of the model")
    def assign(self, share: Share, transport: Transport) -> None:
        """Compute the units of `share` from now on; nothing is decoded, and nothing is kept of what was.

        Raises BudgetError when they do not fit; then nothing is assigned.
        """
        self.release()
        graph, layout = self.maps[ONE_TOKEN]
        backing, driver = self._backing, self.loaded.driver
        holdings = replace(self.holdings, kv_bytes=self._drop_foreign(share))
        terms = slice_terms(self.loaded, self.maps, share, holdings, self.lendable_bytes)
        readers = Readers(self.config.readers)
        self._assigned.callback(readers.close)
        try:
            memory = WeightMemory(backing.address_space, backing.sources, readers, driver.interrupt.check)
            grant = bound(self.loaded.enter_in_ledger, ledger=self._ledger, stack=self._assigned)
            plan, streams = open_streams(own_part(graph, layout, share), terms, memory, grant)
            terms, spilled = replace(terms, away_bytes=plan.spilled_kv_bytes), None
            if terms.away_bytes:
                spilled = open_spill(self.loaded, terms, readers, self._assigned)
                spilled.chooser = chooser_of(self.loaded, graph, is_spilled=True)
            self._supply = Supply(self.loaded, Begun(plan, streams, spilled=spilled), readers)
            self._assigned.callback(self._supply.close)
            lent = open_lender(self.loaded, terms, plan, streams, self.decoder.count, spilled)
            self._assignment = Assignment(share, transport, self.maps, self._supply, driver, lent, spilled)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give up all weights and all that was decoded. Idempotent."""
        self._past_reads += self._supply.own_totals
        self._past_wait_s, spilled = self.wait_s, self.kv_spill
        self._past_spill = replace(spilled, away_bytes=0) if spilled else None
        assignment, self._assignment, self._supply = self._assignment, None, self._idle
        if assignment:
            assignment.end()
        self._assigned.close()
        self.decoder.clear()
        self._backing.address_space.reserve()

    @system_errors("mapping a pass")
    def learn(self, shape: PassShape) -> None:
        """Map the graph of passes of `shape`; nothing is kept of what was decoded. Raises ConfigError, NotSupported."""
        assignment = self._assignment
        self.maps.check_learnable(shape)
        if assignment and assignment.lent_residency:
            assignment.lent_residency.take_back()
        self.decoder.clear()
        self.maps.learn(shape)
        if assignment:
            assignment.compile(shape)
            self._drop_foreign(assignment.share)

    def tail_rows(self, n_rows: int) -> Logits:
        """Compute the tail of a pass, where it is split off and is this device's; return its rows of logits."""
        assert self._assignment is not None
        with self._assignment.computing_tail():
            return self.decoder.tail_rows(n_rows)

    def close(self) -> None:
        """Stop the readers and free everything. Idempotent."""
        self._stack.close()

    def _drop_foreign(self, share: Share) -> int:
        """Give back the memory of what other units keep between passes; return the bytes that are left."""
        dropped = 0
        for address, size_bytes, unit in self.layout.kept:
            if share.owners[unit] != share.node:
                start = round_up(address, _libc.PAGE)
                length = round_down(address + size_bytes, _libc.PAGE) - start
                if length > 0:
                    _libc.drop_pages(start, length)
                    dropped += length
        return max(0, self.holdings.kv_bytes - dropped)
