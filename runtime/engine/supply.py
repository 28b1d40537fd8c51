"""How the weights of an open model are read: once as a whole, in every pass, or by llama.cpp's own loader."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from edge_run.base.results import ExpertUse, KvSpill, Plan
from edge_run.devices.host.ledger import Ledger
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import ONE_TOKEN, PassShape, compile_program
from edge_run.runtime.decoding.narrow_pass import NarrowPass, map_narrow_pass
from edge_run.runtime.decoding.weight_copies import CopySchedule, WeightCopies
from edge_run.runtime.engine.caching import start_cached, use_page_cache
from edge_run.runtime.engine.choosing import chooser_of
from edge_run.runtime.engine.lending import open_lender
from edge_run.runtime.engine.loading import Loaded, WeightBacking
from edge_run.runtime.engine.spilling import open_spill, spillable_uses
from edge_run.runtime.forecasting import routing
from edge_run.runtime.gpu.loading import host_weights, open_upload
from edge_run.runtime.graph.cell_uses import cell_uses, with_cells
from edge_run.runtime.inspection.draft_file import GUESSED_TOKENS
from edge_run.runtime.llama.context_shape import lends_cells
from edge_run.runtime.llama.row_products import RowProducts
from edge_run.runtime.planning.keep_terms import with_bounds
from edge_run.runtime.planning.memory_plan import plan_plain, plan_resident
from edge_run.runtime.planning.spill_terms import check_spill, with_spill
from edge_run.runtime.planning.terms import Terms
from edge_run.runtime.streaming.assemble import Streams, WeightMemory, open_streams
from edge_run.runtime.streaming.chosen_rows import ChosenRows
from edge_run.runtime.streaming.experts import ExpertStreaming
from edge_run.runtime.streaming.lent_residency import LentResidency
from edge_run.runtime.streaming.route_recorder import RouteRecorder
from edge_run.runtime.streaming.spilled_cells import SpilledCells
from edge_run.runtime.streaming.weights import WeightStreaming
from edge_run.tiers._libc import PAGE
from edge_run.tiers.drives.cached_start import CachedStart
from edge_run.tiers.drives.copied_source import Drives
from edge_run.tiers.kv.cells import CellCount, Cells, StreamCount
from edge_run.tiers.kv.loans import idle_bytes
from edge_run.tiers.readers import NOTHING_READ, Readers, ReadTotals
from edge_run.tiers.residency import Residency
from edge_run.tiers.upload import Upload
from edge_run.tiers.weights import MAX_READ_CHUNKS


@dataclass(frozen=True, slots=True)
class Begun:
    """How weights began to be read.

    plan: what goes where.
    streams: the features that read the weights of a pass.
    whole: waits for all weights of a model that is read once, but those that begin in the page cache.
    cached: these.
    lender: lends the weights what passes leave.
    spilled: the keys and values that may be in a file.
    """

    plan: Plan
    streams: Streams = ()
    whole: Callable[[], object] | None = None
    cached: CachedStart | None = None
    lender: LentResidency | None = None
    spilled: SpilledCells | None = None


class Supply:
    """The weights of an open model, under `plan`. Not thread-safe, except `share_done`.

    streams: the features that read the weights of a pass.
    is_unread: whether the first pass has not yet waited for them.
    """

    def __init__(
        self, loaded: Loaded, begun: Begun, readers: Readers | None = None, upload: Upload | None = None
    ) -> None:
        """Supply the weights of `loaded`, which `readers` read. upload: that of the weights that lie on a GPU."""
        self.plan, self.streams, self.is_unread = begun.plan, begun.streams, readers is not None
        self._loaded, self._readers, self._upload = loaded, readers, upload
        self._whole, self._cached, self._lender, self._spilled = begun.whole, begun.cached, begun.lender, begun.spilled
        for stream in self.streams:
            if self._spilled and isinstance(stream, ExpertStreaming):
                stream.usage.spilled = self._spilled.spill

    @property
    def count(self) -> CellCount | None:
        """How many of the context's cells are in use, where their memory is lent."""
        return self._lender.count if self._lender else None

    def tell(self, say: Callable[[str], None]) -> None:
        """Have `say` told, in a line, what cannot be done and is gone on without."""
        if self._lender:
            self._lender.say = say
        if drives := self._drives:
            drives.tell(say)

    @property
    def read_totals(self) -> ReadTotals:
        """What the readers read so far; of two drives, all that they read since the model was opened."""
        return self.own_totals + (self._drives.totals if self._drives else NOTHING_READ)

    @property
    def own_totals(self) -> ReadTotals:
        """The same, without what the drives count: they are the model's, which may have one supply after the other."""
        totals = self._readers.totals if self._readers else NOTHING_READ
        if (backing := self._loaded.backing) is None:
            return totals
        if cached_bytes := sum(source.cached_bytes for source in backing.sources):
            copied_bytes = self._cached.copied_bytes if self._cached else 0
            arrived_bytes = min(cached_bytes, totals.bytes_read + copied_bytes)  # a copy that is under way is no part
            totals += ReadTotals(copied_bytes, cached_bytes=arrived_bytes)
        return totals

    @property
    def wait_s(self) -> float:
        """Seconds that passes have waited for weights, keys and values so far."""
        return sum(stream.wait_s for stream in self.streams) + (self._spilled.wait_s if self._spilled else 0.0)

    @property
    def kv_spill(self) -> KvSpill | None:
        """What of keys and values went to a file; None where all stay in memory."""
        return self._spilled.figures if self._spilled else None

    @property
    def _drives(self) -> Drives | None:
        return self._loaded.backing.drives if self._loaded.backing else None

    @property
    def expert_use(self) -> ExpertUse | None:
        """How a mixture of experts was streamed so far; None where nothing streams by expert."""
        return next((stream.use for stream in self.streams if isinstance(stream, ExpertStreaming)), None)

    def share_done(self) -> float:
        """Return how much of the step at hand is done, 0 to 1."""
        if self.is_unread and self._whole:
            return self.read_totals.bytes_read / max(1, self.plan.model_bytes)
        return self._loaded.driver.share_done if self.plan.mode == "streamed" else 0.0

    def check(self) -> None:
        """Check that the files in use are unchanged, and wait for the weights that go to a GPU."""
        if self.plan.mode == "streamed" or self.is_unread:
            self._check_files()
        if self._cached:
            self._cached.check()
        if self._upload and not self._upload.is_done:
            self._upload.finish()
            self._check_files()

    def check_read(self) -> None:
        """Raise ModelFileError when a file changed while weights were read in a pass, or on its pages themselves."""
        if self.plan.mode == "streamed":
            self._check_files()
        elif self._cached:
            self._cached.check_read()

    def bring(self) -> bool:
        """Wait, the first time, for weights that are read once; return whether it was the first time.

        Raises ModelFileError when a file changed until then: what was read is part old, part new.
        """
        is_first = self.is_unread and self._whole is not None
        if is_first and self._whole:
            self._whole()
            self._check_files()
        self.is_unread = False
        return is_first

    def _check_files(self) -> None:
        """Raise ModelFileError when a file that weights are read from was written to since it was opened."""
        if (backing := self._loaded.backing) is None:
            return
        for source in backing.sources:
            source.check_unchanged()
        if backing.repacked:
            backing.repacked.check_unchanged()
        for stream in self.streams:
            if isinstance(stream, ExpertStreaming) and stream.packed:
                stream.packed.file.check_unchanged()

    def close(self) -> None:
        """Stop the readers, and save what was learnt about streaming by expert for later runs. Idempotent."""
        if self._readers:
            self._readers.close()
        if self._cached:
            self._cached.close()
        if self._upload:
            self._upload.close()
        prepared, streams, self.streams = self._loaded.prepared, self.streams, ()
        for stream in streams:
            stream.close()
            if isinstance(stream, ExpertStreaming):
                tunables = stream.tuning.found if stream.tuning else {}
                routing.remember(prepared.gguf, prepared.config.cache, stream.usage, tunables)


def open_supply(
    loaded: Loaded, ledger: Ledger, stack: contextlib.ExitStack, recorder: RouteRecorder | None = None
) -> Supply:
    """Plan, and begin to read. Raises BudgetError.

    ledger: the memory of this user's runs.
    stack: closes the supply.
    recorder: is told which experts are in memory.
    """
    backing = loaded.backing
    if backing is None:
        return Supply(loaded, Begun(plan_plain(loaded.terms(loaded.holdings))))
    readers = Readers(loaded.prepared.config.readers)
    stack.callback(readers.close)
    begin = _whole if backing.is_whole else _streamed
    begun = begin(loaded, backing, readers, ledger, stack)
    for stream in begun.streams:
        if recorder and isinstance(stream, ExpertStreaming):
            recorder.is_resident = stream.is_resident
    offload, gguf = loaded.prepared.offload, loaded.prepared.gguf
    check = loaded.driver.interrupt.check
    upload = open_upload(loaded.model, gguf, backing.sources, readers, offload.gpu, check) if offload else None
    supply = Supply(loaded, begun, readers, upload)
    stack.callback(supply.close)
    return supply


def _whole(
    loaded: Loaded, backing: WeightBacking, readers: Readers, ledger: Ledger, stack: contextlib.ExitStack
) -> Begun:
    """Read everything, in file order; the first pass waits for all of it."""
    everything = backing.chunks
    plan = plan_resident(loaded.terms(loaded.holdings), backing.address_space, everything)
    use_page_cache(loaded, backing, plan, ledger)
    loaded.enter_in_ledger(plan, ledger, stack)
    cached = start_cached(backing, plan)
    stack.callback(cached.close)
    rest = [chunk for chunk in everything if chunk not in cached.mapped]
    states = Residency(backing.address_space.n_chunks, rest, rest, 0)
    memory = _memory(loaded, backing, readers)
    weights = memory.weights_in_order(states, MAX_READ_CHUNKS, compares=False)  # nothing is read twice
    weights.start()
    return Begun(plan, whole=lambda: weights.acquire(rest), cached=cached)


def _streamed(
    loaded: Loaded, backing: WeightBacking, readers: Readers, ledger: Ledger, stack: contextlib.ExitStack
) -> Begun:
    """Map the graph, plan, and begin to read."""
    driver, cuts = loaded.driver, _follow_cuts(loaded, backing)
    narrow, terms = _mapped(loaded)
    graph = narrow.graph
    if cuts:
        backing.address_space.reserve()
    products = RowProducts(loaded.shape.threads)
    stack.callback(products.close)
    memory = replace(_memory(loaded, backing, readers), products=products)
    grant = partial(loaded.enter_in_ledger, ledger=ledger, stack=stack)
    plan, streams = open_streams(graph, terms, memory, grant)
    for stream in streams:
        stack.callback(stream.close)  # where the opening ends before there is a supply; idempotent
    stack.callback(readers.close)  # before what they read, and read to
    for stream in streams:
        if cuts and isinstance(stream, WeightStreaming):
            driver.follow_copies(WeightCopies(cuts, stream))
    terms = replace(terms, context_tokens=plan.context_tokens, away_bytes=plan.spilled_kv_bytes)
    if plan.context_tokens < plan.wanted_context_tokens:
        check_spill(loaded.prepared.config, terms.cells, loaded.prepared.gguf.shards[0].path)
    spilled = None
    if terms.away_bytes:
        spilled = open_spill(loaded, terms, readers, stack)
        graph = with_cells(graph, narrow.flow, spilled.addresses)
    chooser = chooser_of(loaded, graph, is_spilled=spilled is not None)
    if spilled:
        spilled.chooser = chooser
    chosen = [chooser] if isinstance(chooser, ChosenRows) else []
    driver.features += [*streams, *chosen, *([spilled] if spilled else [])]
    driver.programs[ONE_TOKEN] = compile_program(graph, driver.features, cuts.splits() if cuts else ())
    lender = _lend(loaded, terms, plan, streams, products, spilled)
    if lender and chosen:
        lender.on_cut = chosen[0].cut
    return Begun(plan, streams, lender=lender, spilled=spilled)


def _memory(loaded: Loaded, backing: WeightBacking, readers: Readers) -> WeightMemory:
    check = loaded.driver.interrupt.check
    return WeightMemory(backing.address_space, backing.sources, readers, check, repacked=backing.repacked)


def _lend(
    loaded: Loaded,
    terms: Terms,
    plan: Plan,
    streams: Streams,
    products: RowProducts,
    spilled: SpilledCells | None,
) -> LentResidency | None:
    """Have weights borrow what passes leave, and a draft model ask for room before it guesses; see `open_lender`."""
    count = _count_of(terms) if terms.cells else None
    lender = open_lender(loaded, terms, plan, streams, count, spilled, products, loaded.shape.narrow_tokens)
    if lender is None:
        return None
    loaded.driver.before_pass = lambda shape: lender.before_pass(shape.tokens, shape.outputs)
    if loaded.draft:
        loaded.draft.make_room = lender.before_drafting
        if loaded.draft.weights and terms.draft_idle_bytes:
            lender.hold_draft(terms.draft_idle_bytes)
            loaded.draft.weights.on_leave = lender.rest_draft
        loaded.draft.limit(terms.context_tokens + GUESSED_TOKENS)
    return lender


def _count_of(terms: Terms) -> CellCount:
    if terms.cells and terms.cells.n_streams > 1:
        return StreamCount(terms.context_tokens, terms.cells.n_streams)
    return CellCount(terms.context_tokens, terms.verified_tokens)


def _mapped(loaded: Loaded) -> tuple[NarrowPass, Terms]:
    """Return what passes of one token are like, and the terms of a plan that may lend what passes leave."""
    driver, shape = loaded.driver, loaded.shape
    widest = PassShape(shape.narrow_tokens, shape.narrow_outputs)
    with contextlib.closing(LocalDecoder(loaded.model, loaded.context, driver, shape)) as decoder:
        is_lendable = not loaded.prepared.offload  # what is copied to a GPU has an order of its own
        narrow = map_narrow_pass(decoder, driver, widest if is_lendable else ONE_TOKEN)
    terms = loaded.terms(loaded.holdings)
    if not is_lendable:
        return narrow, terms
    is_by_cell = loaded.context.untouched_bytes and lends_cells(loaded.prepared.config)
    cells = Cells(narrow.flow.cells, PAGE, shape.n_streams) if is_by_cell else None
    idle = idle_bytes(narrow.buffer_bytes, narrow.touched_bytes)
    draft_cells = loaded.draft.cells if loaded.draft else None
    assert loaded.backing is not None
    chunk_bytes = loaded.backing.address_space.chunk_bytes
    lent = loaded.prepared.lending(terms, shape, chunk_bytes, cells, draft_cells, idle, loaded.model.vocabulary)
    config, flow = loaded.prepared.config, narrow.flow
    lent = with_bounds(lent, flow.cells, cell_uses(narrow.graph, flow), config)
    return narrow, with_spill(lent, spillable_uses(loaded, narrow.graph, flow, flow.cells), config)


def _follow_cuts(loaded: Loaded, backing: WeightBacking) -> CopySchedule | None:
    """Make the driver follow the copies to a GPU, if there are any; until weights are read, they are zeros."""
    offload = loaded.prepared.offload
    if not (offload and offload.has_op_offload):
        return None
    cuts = CopySchedule(host_weights(loaded.model))
    loaded.driver.follow_cuts(cuts)
    backing.address_space.map_zeros()
    return cuts
