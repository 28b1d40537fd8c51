"""Weights that stream: planned, and set going. By expert for a mixture with room for that, else in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_run.base.results import Plan
from edge_run.partition.turns import LONG_RUN
from edge_run.prefetch.experts import ExpertCache, Mixture
from edge_run.prefetch.policies import make_policy
from edge_run.prefetch.schedule import join_turns
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.graph.segments import chunks_of, cut_into_stretches
from edge_run.runtime.planning.expert_plan import MixturePlan, plan_mixture, token_bytes
from edge_run.runtime.planning.memory_plan import RowRange, plan_streamed, row_ranges
from edge_run.runtime.planning.routing import Usage
from edge_run.runtime.planning.terms import Terms, used_experts
from edge_run.runtime.streaming.experts import Adaptation, ExpertRoom, ExpertStreaming
from edge_run.runtime.streaming.prefetch import OFF, SETTINGS, ExpertPrefetch
from edge_run.runtime.streaming.tuning import Tuning
from edge_run.runtime.streaming.weights import PinnedWeights, WeightStreaming
from edge_run.tiers.on_demand import OnDemand
from edge_run.tiers.readers import Readers
from edge_run.tiers.residency import Residency
from edge_run.tiers.rows import RowTable
from edge_run.tiers.source import Source, SourceFile
from edge_run.tiers.territory import Territory
from edge_run.tiers.weights import MAX_READ_CHUNKS, READ_BYTES, Weights

if TYPE_CHECKING:
    from edge_run.tiers.packed import PackedBlocks

ON = "on"

Streams = Sequence[WeightStreaming | ExpertStreaming]


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """Where weights go and come from. check runs while a pass waits for weights, and may raise to stop it."""

    territory: Territory
    sources: Sequence[SourceFile]
    readers: Readers
    check: Callable[[], None]

    def tables(self, ranges: Sequence[RowRange]) -> list[RowTable]:
        """Return the tables of which only rows are read."""
        return [
            RowTable(r.start, r.stop, r.file_offset, self.sources[r.shard], self.readers, r.budget_bytes)
            for r in ranges
        ]


def open_streams(
    graph: GraphMap, terms: Terms, memory: WeightMemory, grant: Callable[[Plan], None]
) -> tuple[Plan, Streams]:
    """Return the plan, and the features that carry it out, which have begun to read. Raises BudgetError.

    grant: is given the plan before it takes any memory, and may raise.
    """
    mixture = plan_mixture(terms, graph, memory.territory)
    if mixture is None:
        return _in_order(graph, terms, memory, grant)
    grant(mixture.plan)
    return mixture.plan, _by_expert(mixture, memory, terms)


def _in_order(
    graph: GraphMap, terms: Terms, memory: WeightMemory, grant: Callable[[Plan], None]
) -> tuple[Plan, Streams]:
    """Let weights come and go in the order of the first pass."""
    territory = memory.territory
    ranges = row_ranges(graph, territory, terms.micro_batch_tokens)
    stretches = cut_into_stretches(graph, lambda read: chunks_of(read, territory, ranges))
    # Where a GPU's parts begin are borders too, but nobody else computes in between.
    borders = [i for i, node in enumerate(graph) if node.is_border]
    turns = [turn.needs for turn in join_turns(stretches, borders)] if terms.gpu is None else []
    if len(turns) > 2 and graph[0].is_computed:  # with the head, and so the tail: the two follow each other
        turns = [(*turns[0], *turns.pop()), *turns[1:]]
    plan, residency = plan_streamed(terms, territory, [stretch.needs for stretch in stretches], ranges, turns)
    grant(plan)
    tables = memory.tables(ranges)
    order = [chunk for stretch in stretches for chunk in stretch.acquire]
    states = Residency(territory.n_chunks, order, residency.pinned, residency.n_frames)
    run_chunks = LONG_RUN if residency.by_turns else MAX_READ_CHUNKS
    weights = Weights(territory, memory.sources, memory.readers, states, run_chunks=run_chunks, check=memory.check)
    weights.start()
    if not residency.n_frames:  # nothing ever leaves, so no pass need stop for it
        return plan, [PinnedWeights(weights, territory, tables)]
    pinned, guests, by_turns = residency.pinned, residency.guests, residency.by_turns
    return plan, [WeightStreaming(weights, territory, tables, pinned, guests, by_turns)]


def _by_expert(mixture: MixturePlan, memory: WeightMemory, terms: Terms) -> Streams:
    """Keep all but the experts, and let these come as they are chosen."""
    n_used = used_experts(terms.gguf)
    territory, experts, n_frames = mixture.territory, mixture.experts, mixture.n_frames
    n_dense_frames = len(mixture.dense) - len(territory.ragged)  # which are dense, and have memory of their own
    states = OnDemand(territory.n_chunks, n_dense_frames + n_frames, territory.ragged)
    run_chunks = READ_BYTES // territory.chunk_bytes
    sources, blocks = _unpacking(memory.sources, terms)
    weights = Weights(territory, sources, memory.readers, states, run_chunks=run_chunks, check=memory.check)
    pinned = PinnedWeights(weights, territory, memory.tables(mixture.ranges), experts.at.keys(), mixture.dense)
    weights.hold(mixture.dense)
    shape = Mixture(tuple(range(len(experts.layers))), experts.n_experts, n_used)
    policy = make_policy(terms.expert_policy, shape)
    cache = ExpertCache(n_frames, dict(enumerate(experts.sizes)), policy, experts.size_of)
    adaptation = _adaptation(
        mixture, memory.readers, ExpertPrefetch(terms.gguf, shape, cache.__contains__), blocks, terms
    )
    room = ExpertRoom(n_frames, n_used, terms.micro_batch_tokens)
    return [pinned, ExpertStreaming(experts, cache, weights, room, adaptation)]


def _unpacking(sources: Sequence[SourceFile], terms: Terms) -> tuple[Sequence[Source], PackedBlocks | None]:
    """Return where weights are read from, and the packed blocks among it."""
    if not terms.packed:
        return sources, None
    from edge_run.tiers.packed import PackedBlocks, PackedSource

    blocks = PackedBlocks(terms.packed)
    return [PackedSource(source, shard, blocks) for shard, source in enumerate(sources)], blocks


def _adaptation(
    mixture: MixturePlan, readers: Readers, prefetch: ExpertPrefetch, packed: PackedBlocks | None, terms: Terms
) -> Adaptation:
    """Let what can be set be set by measuring, as far as nobody has said what it is to be."""
    asked, tensors = terms.expert_prefetch, mixture.experts.at.values()
    usage = Usage(mixture.room_share, token_bytes(terms, tensors, is_packed=True), readers)

    def set_prefetch(setting: str) -> None:
        prefetch.setting = setting

    few = [str(terms.readers // 2)] if terms.readers > 1 else []
    levers: dict[str, tuple[Sequence[str], Callable[[str], None]]] = {
        "prefetch": (list(SETTINGS) if asked == "auto" else [asked], set_prefetch),
        "readers": ([str(terms.readers), *few], lambda setting: readers.set_active(int(setting))),
    }
    if packed:

        def set_packed(setting: str) -> None:
            packed.is_on = setting == ON
            usage.token_bytes = token_bytes(terms, tensors, is_packed=setting == ON)

        levers = {"packed": ([ON] if packed.packed.is_named else [ON, OFF], set_packed), **levers}
    return Adaptation(usage, prefetch, Tuning(levers, terms.experience.levers), packed)
