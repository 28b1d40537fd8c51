"""An engine that computes some units of a model: the rest is neither read nor kept, and takes no memory.

It opens like any other up to the graph map; what it computes is said afterwards, and may be said anew: then weights are
given up, and others are read, while llama.cpp's model and context stay.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edge_run.base.config import PACKED_OFF, ModelConfig
from edge_run.base.errors import NotSupported, system_errors
from edge_run.base.protocols import BatchToken
from edge_run.base.results import Numerics, Plan
from edge_run.runtime.decoding.driver import PassShape, compile_program
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.graph.segments import chunks_of, cut_into_stretches
from edge_run.runtime.graph.units import Layout, lay_out
from edge_run.runtime.llama.holdings import RESERVE_BYTES, WORKER_RESERVE_BYTES, Holdings
from edge_run.runtime.planning.memory_plan import make_plan
from edge_run.runtime.planning.terms import used_experts
from edge_run.runtime.slices.lending import Lending, lendable_bytes
from edge_run.runtime.slices.pieces import pieces_read
from edge_run.runtime.slices.slice import Share, Slice, Wire, own_part
from edge_run.runtime.streaming.assemble import WeightMemory, open_streams
from edge_run.runtime.streaming.experts import ExpertStreaming
from edge_run.runtime.streaming.weights import InTurns, WeightStreaming
from edge_run.tiers import _libc
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.partial import PartialModel, PartialSource
from edge_run.tiers.pieces import Pieces
from edge_run.tiers.readers import Readers, ReadTotals
from edge_run.tiers.source import SourceFile
from edge_run.tiers.territory import CHUNK_BYTES

MOST_MAPS = 32  # graphs of passes of different shapes; a model has a handful


class SliceEngine(Engine):
    """An open model of which this device computes a share. Until `assign` it computes nothing."""

    may_be_whole = False
    least_reserve_bytes = WORKER_RESERVE_BYTES

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        chunk_bytes: int = CHUNK_BYTES,
        partial: PartialModel | None = None,
        gguf: GgufModel | None = None,
    ) -> None:
        """Open the model at `path` and map its graph; no weight is read. Raises as `Engine` does.

        partial: of this model only some pieces are there; those that it `needs` must be before they are assigned.
        Nothing of it goes to a GPU, and experts are read from the model itself.
        """
        self._partial = partial
        self._maps: dict[PassShape, tuple[GraphMap, Layout]] = {}
        self._share: tuple[Share, Wire] | None = None
        self._assigned = contextlib.ExitStack()
        self._past_reads, self._past_wait_s = ReadTotals(), 0.0
        self._lendable_bytes = 0
        self._lending: Lending | None = None
        super().__init__(path, replace(config, gpu_memory=0, packed=PACKED_OFF), chunk_bytes, gguf=gguf)

    @property
    def layout(self) -> Layout:
        """The units of this model, in a pass of one token."""
        return self._maps[PassShape(1, 1)][1]

    @property
    def holdings(self) -> Holdings:
        """What the process held when the model was open, and nothing was assigned."""
        return self._holdings

    @property
    def lendable_bytes(self) -> int:
        """Of the buffers, what passes of one token leave to weights."""
        return self._lendable_bytes

    @property
    def pair_chunks(self) -> int:
        """The chunks of two stretches in a row, where they are most: streaming holds both at once."""
        graph, territory = self.graph(PassShape(1, 1)), self._territory
        stretches = cut_into_stretches(graph, lambda read: chunks_of(read, territory, ()))
        sizes = [len(stretch.needs) for stretch in stretches]
        return max((a + b for a, b in itertools.pairwise(sizes)), default=0)

    @property
    def chunk_bytes(self) -> int:
        """The size of a chunk."""
        return self._chunk_bytes

    @property
    def numerics(self) -> Numerics:
        """The numerics key, with what states are that come from other devices."""
        return replace(super().numerics, mesh_states=self.config.mesh_states)

    def check_cancelled(self) -> None:
        """Raise Cancelled when the pass in progress was cancelled."""
        self._driver.check_cancelled()

    def unknown_shape(self, batch: Sequence[BatchToken]) -> PassShape | None:
        """Return a shape of the passes of `batch` whose graph was not mapped; the first, where all were."""
        starts = range(0, len(batch), self.width)
        shapes = [self.decoder.limits.shape_of(batch[start : start + self.width]) for start in starts]
        return next((shape for shape in shapes if shape not in self._maps), shapes[0] if shapes else None)

    def graph(self, shape: PassShape) -> GraphMap:
        """Return the graph of passes of `shape`, which is known."""
        return self._maps[shape][0]

    @property
    def read_totals(self) -> ReadTotals:
        """What the readers read so far, for all that was assigned."""
        return self._past_reads + super().read_totals

    @property
    def wait_s(self) -> float:
        """Seconds that passes have waited for weights so far."""
        return self._past_wait_s + super().wait_s

    @property
    def width(self) -> int:
        """Tokens in one pass at most."""
        return self.shape.micro_batch_tokens

    @system_errors("taking a share of the model")
    def assign(self, share: Share, wire: Wire) -> None:
        """Compute the units of `share` from now on; nothing is decoded, and nothing is kept of what was.

        Raises BudgetError when they do not fit; then nothing is assigned.
        """
        self.release()
        graph, layout = self._maps[PassShape(1, 1)]
        kept_bytes = self._drop_foreign(share)
        terms = replace(self._terms(replace(self._holdings, kv_bytes=kept_bytes)), lent_bytes=self._lendable_bytes)
        readers = self._readers = Readers(self.config.readers)
        self._assigned.callback(readers.close)
        check = self._driver.check_cancelled
        memory = WeightMemory(self._territory, self._sources, readers, self._chunk_bytes, check)
        self._share = share, wire
        try:
            self.plan, self._streams = open_streams(
                own_part(graph, layout, share), terms, memory, self._enter_in_ledger
            )
            self._lending = self._lend(self.plan)
            self._driver.features[:] = self._streams
            self._compile_all()
        except BaseException:
            self.release()
            raise

    def needs(self, share: Share, pieces: Pieces) -> set[int]:
        """Return the pieces of the model that computing `share` reads."""
        found: set[int] = set()
        for graph, layout in self._maps.values():
            found |= pieces_read(own_part(graph, layout, share), self._territory, pieces)
        return found

    def unit_needs(self, pieces: Pieces) -> list[set[int]]:
        """Return the pieces that each unit reads."""
        graph, layout = self._maps[PassShape(1, 1)]
        limits = [layout.start_of(unit) for unit in range(len(layout.units) + 1)]
        return [pieces_read(graph[a:b], self._territory, pieces) for a, b in itertools.pairwise(limits)]

    def release(self) -> None:
        """Give up all weights and all that was decoded. Idempotent."""
        self._remember_experts()
        self._past_reads, self._past_wait_s = self.read_totals, self.wait_s
        self._streams, self._share, self._readers, self._lending = (), None, None, None
        self._driver.features.clear()
        self._driver.programs.clear()
        self._assigned.close()
        if self._maps:
            self.decoder.clear()
            self._territory.claim()

    @system_errors("mapping a pass")
    def learn(self, shape: PassShape) -> None:
        """Map the graph of passes of `shape`; nothing is kept of what was decoded. Raises ConfigError, NotSupported."""
        self.decoder.limits.check_shape(shape)
        if len(self._maps) >= MOST_MAPS and shape not in self._maps:
            raise NotSupported(f"this model cannot be spread over devices: its passes have over {MOST_MAPS} graphs")
        if self._lending:
            self._lending.take_back()
        self.decoder.clear()
        # Of another shape first: llama.cpp uses its last graph again, and a pass that failed has cleared flags in it.
        self.decoder.map_graph(self._unlike(shape))
        self._driver.take_flow()
        self._map(shape)
        if self._share:
            self._compile(shape)
            self._drop_foreign(self._share[0])

    def _unlike(self, shape: PassShape) -> PassShape:
        """Return another shape of passes than `shape`."""
        if shape.tokens > 1 or self.width == 1:
            return PassShape(1, 0 if shape == (1, 1) else 1)
        return PassShape(2, 1)

    def close(self) -> None:
        """Stop the readers and free everything. Idempotent."""
        self._remember_experts()
        self._streams = ()
        self._assigned.close()
        super().close()

    def _open_source(self, shard: int) -> SourceFile:
        return PartialSource(self._partial, shard) if self._partial else super()._open_source(shard)

    def _open_plain(self) -> Plan:
        raise NotSupported(f"a mesh needs edge-run's own loader here: {self.backend.reason}")

    def _open_streamed(self, holdings: Holdings, readers: Readers) -> Plan:
        readers.close()  # each share has its own
        self._readers = None
        self._stack.callback(self._assigned.close)
        self._holdings = holdings
        self._make_decoder(self._begin)
        self._context.keep_cores()
        self._driver.is_partial, self._driver.before_pass = True, self._before_pass
        self._map(PassShape(1, 1))
        self._holdings = replace(holdings, reserve_bytes=self._reserve())
        self._lendable_bytes = self._lendable()
        return make_plan(self._terms(holdings), mode="streamed", items=holdings.items())

    def _before_pass(self, shape: PassShape) -> None:
        if self._lending:
            self._lending.before_pass(shape.tokens)

    def _reserve(self) -> int:
        """Return what to keep for later: besides the least, for states on their way, in and out, twice each."""
        state_bytes = max(unit.entry_bytes for unit in self.layout.units)
        return min(RESERVE_BYTES, self.least_reserve_bytes + 4 * self.width * state_bytes)

    def _lendable(self) -> int:
        """Return what of llama.cpp's buffer weights may have; nothing where narrow passes are not the rule."""
        config = self.config
        is_narrow = config.sequences == 1 and not config.exact and used_experts(self.gguf) == 1
        return lendable_bytes(self._driver.scratch, self.layout.flow) if is_narrow else 0

    def _lend(self, plan: Plan) -> Lending | None:
        """Return what lends memory to the weights that stream under `plan`."""
        stream = self._streams[0]
        if not plan.lent_bytes or isinstance(stream, ExpertStreaming):
            return None
        driver = self._driver
        return Lending(
            driver.scratch, stream.weights, stream.guests, plan.lent_bytes, driver.check_cancelled, self._compile_all
        )

    def _map(self, shape: PassShape) -> None:
        graph = self.decoder.map_graph(shape)
        layout = lay_out(graph, self._driver.take_flow())
        if self._maps and layout.shape != self.layout.shape:
            raise NotSupported(
                f"this model cannot be spread over devices: in a pass of {shape.tokens} tokens it has other layers"
            )
        self._maps[shape] = graph, layout

    def _compile_all(self) -> None:
        for shape in self._maps:
            self._compile(shape)
        wide = PassShape(2, 1)
        if wide not in self._maps:  # from which wide shapes that are not known are guessed: they take no turns
            self._compile(wide, like=PassShape(1, 1))

    def _compile(self, shape: PassShape, like: PassShape | None = None) -> None:
        """Make the program of `shape`, which has its own graph, or that of `like`."""
        assert self._share is not None
        (share, wire), (graph, layout) = self._share, self._maps[like or shape]
        is_lent = shape.tokens == 1 and not (self._lending and self._lending.is_over)
        streams = [InTurns(one) if is_lent and isinstance(one, WeightStreaming) else one for one in self._streams]
        parts = [Slice(share, wire, layout), *streams]
        self._driver.programs[shape] = compile_program(own_part(graph, layout, share), parts)

    def _drop_foreign(self, share: Share) -> int:
        """Give back the memory of what other units keep between passes; return the bytes that are left."""
        dropped = 0
        for address, size_bytes, unit in self.layout.kept:
            if share.owners[unit] != share.node:
                start = -(-address // _libc.PAGE) * _libc.PAGE
                length = (address + size_bytes) // _libc.PAGE * _libc.PAGE - start
                if length > 0:
                    _libc.drop_pages(start, length)
                    dropped += length
        return max(0, self._holdings.kv_bytes - dropped)

    def _enter_in_ledger(self, plan: Plan) -> None:
        sizes = {item.what: item.size_bytes for item in plan.items}
        grant = self._ledger.grant(sum(sizes.values()), self.gguf.shards[0].path.name, held_bytes=sizes["program"])
        self._assigned.enter_context(grant)

    def _remember_experts(self) -> None:
        """Keep what was learnt of a mixture for later runs."""
        for stream in self._streams:
            if isinstance(stream, ExpertStreaming):
                self._remember(stream)
