"""Plans the weights that stream, and starts them: the experts of a mixture by choice, all others in order."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edge_run.base.results import Plan
from edge_run.partition.plan import ResidencyPlan, with_spare
from edge_run.partition.stage_visits import LONG_RUN
from edge_run.partition.window import SEGMENT_CHUNKS
from edge_run.prefetch.experts import ExpertCache, MoeShape
from edge_run.prefetch.policies import make_policy
from edge_run.prefetch.schedule import Segment, join_stage_visits
from edge_run.runtime.forecasting.routing import Usage
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.graph.segments import chunks_of, cut_into_segments
from edge_run.runtime.llama.row_products import RowProducts
from edge_run.runtime.planning.expert_plan import MoePlan, plan_moe, token_bytes
from edge_run.runtime.planning.experts import ExpertLayout
from edge_run.runtime.planning.memory_plan import plan_streamed, row_ranges
from edge_run.runtime.planning.terms import Terms
from edge_run.runtime.streaming.experts import Adaptation, ExpertRoom, ExpertStreaming
from edge_run.runtime.streaming.lookups import Lookups
from edge_run.runtime.streaming.prefetch import OFF, SETTINGS, ExpertPrefetch
from edge_run.runtime.streaming.tuning import Tuning
from edge_run.runtime.streaming.weights import PinnedWeights, WeightStreaming
from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.on_demand import OnDemand
from edge_run.tiers.readers import Readers
from edge_run.tiers.residency import Residency
from edge_run.tiers.rows import RowRange, RowTable
from edge_run.tiers.source import PiecewiseSource, Source, SourceFile
from edge_run.tiers.weights import MAX_READ_CHUNKS, READ_BYTES, WeightsInOrder, WeightsOnDemand

if TYPE_CHECKING:
    from edge_run.runtime.decoding.repacked_weights import RepackedWeights
    from edge_run.tiers.packed import PackedBlocks

ON = "on"

Streams = Sequence[WeightStreaming | ExpertStreaming]


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """Where weights are read from, and to.

    address_space: where they lie in memory.
    sources: the shards, by number.
    readers: the threads that read.
    check: runs while a pass waits for weights, and may raise to stop it.
    products: computes products with large matrices in slices, where the plan has slices.
    repacked: the weights that are repacked as they are read.
    """

    address_space: AddressSpace
    sources: Sequence[SourceFile]
    readers: Readers
    check: Callable[[], None]
    products: RowProducts | None = None
    repacked: RepackedWeights | None = None

    def weights_in_order(self, states: Residency, run_chunks: int, *, compares: bool = True) -> WeightsInOrder:
        """Return the weights whose chunks `states` keeps account of; a read is of at most `run_chunks` chunks.

        compares: whether what is read again is compared with what was read first.
        """
        return WeightsInOrder(
            self.address_space,
            self._repacking(self.sources),
            self.readers,
            states,
            run_chunks=run_chunks,
            check=self.check,
            compares=compares,
        )

    def weights_on_demand(
        self, states: OnDemand, run_chunks: int, sources: Sequence[PiecewiseSource]
    ) -> WeightsOnDemand:
        """Return the same of weights that are read from `sources` instead of the shards."""
        return WeightsOnDemand(
            self.address_space,
            self._repacking(sources),
            self.readers,
            states,
            run_chunks=run_chunks,
            check=self.check,
        )

    def _repacking(self, sources: Sequence[PiecewiseSource]) -> Sequence[Source]:
        """Return `sources`, or those that repack what is read from them."""
        return self.repacked.sources(sources) if self.repacked else sources

    def lookups(self, ranges: Sequence[RowRange], undo: contextlib.ExitStack) -> Lookups:
        """Return the lookups of rows in the tables that are read by row. undo: ends the readers, and closes them."""
        tables = list[RowTable]()
        for one in ranges:
            tables.append(RowTable(one, self.sources[one.shard], self.readers, self.check))
            undo.callback(tables[-1].close)
        undo.callback(self.readers.close)  # before what they read, and read to
        return Lookups(tables, self.products)


def open_streams(
    graph: GraphMap, terms: Terms, memory: WeightMemory, grant: Callable[[Plan], None]
) -> tuple[Plan, Streams]:
    """Return the plan, and the features that carry it out, which have begun to read. Raises BudgetError.

    grant: is called with the plan before any memory is taken, and may raise.
    """
    moe = plan_moe(terms, graph, memory.address_space)
    with contextlib.ExitStack() as undo:  # of what is open already where the rest cannot be
        if moe is None:
            opened = _in_order(graph, terms, memory, grant, undo)
        else:
            grant(moe.plan)
            opened = moe.plan, _by_expert(moe, memory, terms, undo)
        undo.pop_all()
    return opened


def _in_order(
    graph: GraphMap, terms: Terms, memory: WeightMemory, grant: Callable[[Plan], None], undo: contextlib.ExitStack
) -> tuple[Plan, Streams]:
    """Stream all weights in the order of a pass of one token."""
    address_space = memory.address_space
    ranges = row_ranges(graph, address_space, terms.micro_batch_tokens, has_row_slices=terms.has_row_slices)
    sliced = address_space if terms.has_row_slices else None

    @functools.cache
    def cut(segment_chunks: int) -> list[Segment]:
        return cut_into_segments(graph, lambda read: chunks_of(read, address_space, ranges), segment_chunks, sliced)

    # Where a GPU's parts begin are borders too, but nobody else computes in between.
    borders = [i for i, node in enumerate(graph) if node.is_border]
    visits = [visit.needs for visit in join_stage_visits(cut(SEGMENT_CHUNKS), borders)] if terms.gpu is None else []
    if len(visits) > 2 and graph[0].is_computed:  # with the head, and so the tail: the two follow each other
        visits = [(*visits[0], *visits.pop()), *visits[1:]]
    plan, residency = plan_streamed(terms, address_space, cut, ranges, visits)
    grant(plan)
    segments = cut(residency.segment_chunks)
    lookups = memory.lookups(ranges, undo)
    order = [chunk for segment in segments for chunk in segment.acquire]
    run_chunks = LONG_RUN if residency.by_stage_visits else MAX_READ_CHUNKS
    most_early = 2 * terms.readers * run_chunks
    states = Residency(address_space.n_chunks, order, residency.pinned, residency.n_frames, most_early)
    weights = memory.weights_in_order(states, run_chunks)
    weights.start()
    if not residency.n_frames:  # nothing ever leaves, so no pass need stop for it
        return plan, [PinnedWeights(weights, address_space, lookups)]
    products = memory.products if terms.has_row_slices else None
    residency = with_spare(residency, [segment.needs for segment in segments], address_space.unmovable)
    known = (graph, segments) if terms.gpu is None else None  # what is copied to one is in no segment of a pass
    return plan, [WeightStreaming(weights, address_space, lookups, residency, None, products, known)]


def _by_expert(moe: MoePlan, memory: WeightMemory, terms: Terms, undo: contextlib.ExitStack) -> Streams:
    """Stream experts as they are chosen; pin all other weights, or stream them in order, as the plan says."""
    n_used = terms.gguf.used_experts
    layout, n_frames = moe.layout, moe.n_frames
    address_space, experts, part = layout.address_space, layout.experts, layout.part
    sources, blocks = _unpacking(memory.sources, terms, undo)
    memory = replace(memory, address_space=address_space)
    # Ragged chunks are dense, and have memory of their own.
    n_dense_frames = 0 if moe.residency else len(layout.dense) - len(address_space.unmovable)
    states = OnDemand(address_space.n_chunks, n_dense_frames + n_frames, address_space.unmovable)
    weights = memory.weights_on_demand(states, READ_BYTES // address_space.chunk_bytes, sources)
    lookups = memory.lookups(moe.ranges, undo)
    dense: WeightStreaming
    if moe.residency:
        dense = _dense_in_order(layout, moe.residency, lookups, memory)
    else:
        dense = PinnedWeights(weights, address_space, lookups, part)
        weights.hold(layout.dense)
    shape = MoeShape(tuple(range(len(experts.layers))), experts.n_experts, n_used)
    policy = make_policy(terms.expert_policy, shape)
    cache = ExpertCache(n_frames, dict(enumerate(experts.sizes)), policy, experts.size_of)
    prefetch = ExpertPrefetch(terms.gguf, shape, cache.__contains__)
    adaptation = _adaptation(moe, weights, memory.readers, prefetch, blocks, terms)
    room = ExpertRoom(n_frames, moe.n_lent, moe.n_least, n_used, terms.micro_batch_tokens)
    products = memory.products if terms.has_row_slices else None
    return [dense, ExpertStreaming(experts, cache, weights, room, adaptation, products)]


def _dense_in_order(
    layout: ExpertLayout, residency: ResidencyPlan, lookups: Lookups, memory: WeightMemory
) -> WeightStreaming:
    """Stream the dense part of a model in the order of a pass, through frames of its own."""
    address_space, part = memory.address_space, layout.part
    order = [chunk for segment in layout.segments for chunk in segment.acquire]
    states = Residency(address_space.n_chunks, order, residency.pinned, residency.n_frames)
    weights = memory.weights_in_order(states, READ_BYTES // address_space.chunk_bytes)
    weights.start()
    products = memory.products if part.has_row_slices else None
    residency = with_spare(residency, layout.needs, address_space.unmovable)
    return WeightStreaming(weights, address_space, lookups, residency, part, products)


def _unpacking(
    sources: Sequence[SourceFile], terms: Terms, undo: contextlib.ExitStack
) -> tuple[Sequence[PiecewiseSource], PackedBlocks | None]:
    """Return the sources of the weights, and the packed blocks that they read, if any."""
    if not terms.packed:
        return sources, None
    from edge_run.tiers.packed import PackedBlocks, PackedSource

    blocks = PackedBlocks(terms.packed)
    undo.callback(blocks.close)
    return [PackedSource(source, shard, blocks) for shard, source in enumerate(sources)], blocks


def _adaptation(
    moe: MoePlan,
    weights: WeightsOnDemand,
    readers: Readers,
    prefetch: ExpertPrefetch,
    packed: PackedBlocks | None,
    terms: Terms,
) -> Adaptation:
    """Return the adaptation: every tunable that the user has not set is to be found by measuring."""
    # Predictions look at routers where they lie: no router may come and go.
    asked, tensors = OFF if moe.residency else terms.expert_prefetch, moe.layout.experts.at.values()
    usage = Usage(moe.room_share, token_bytes(terms, tensors, is_packed=True), weights, readers)

    def set_prefetch(setting: str) -> None:
        prefetch.setting = setting

    few = [str(terms.readers // 2)] if terms.readers > 1 else []
    tunables: dict[str, tuple[Sequence[str], Callable[[str], None]]] = {
        "prefetch": (list(SETTINGS) if asked == "auto" else [asked], set_prefetch),
        "readers": ([str(terms.readers), *few], lambda setting: readers.set_active(int(setting))),
    }
    if packed:

        def set_packed(setting: str) -> None:
            packed.is_on = setting == ON
            usage.token_bytes = token_bytes(terms, tensors, is_packed=setting == ON)

        tunables = {"packed": ([ON] if packed.packed.is_named else [ON, OFF], set_packed), **tunables}
    return Adaptation(usage, prefetch, Tuning(tunables, terms.experience.tunables), packed)
