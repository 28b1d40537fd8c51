"""The plan of a mixture of experts that is streamed by expert."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_run.base.results import Plan, PlanItem
from edge_run.prefetch.experts import prediction_bytes
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.graph.segments import chunks_of
from edge_run.runtime.planning.experts import ExpertMap, ExpertTensor, expert_chunk_bytes, expert_tensors
from edge_run.runtime.planning.memory_plan import (
    RowRange,
    items_besides_weights,
    make_plan,
    row_ranges,
    with_page_tables,
)
from edge_run.runtime.planning.routing import hit_rate
from edge_run.runtime.planning.terms import Terms, used_experts
from edge_run.tiers.address_space import AddressSpace


@dataclass(frozen=True, slots=True)
class MoePlan:
    """The plan of a model that is streamed by expert.

    plan: what the user sees of it.
    address_space: the weights in chunks of a size that suits the experts.
    experts: the chunks of each expert.
    dense: the chunks that always stay: all weights but the experts, in order of use, and the ragged chunks.
    ranges: the tables that are only read by row.
    n_frames: the frames of the experts.
    room_share: the share of all experts' bytes that fits these frames.
    """

    plan: Plan
    address_space: AddressSpace
    experts: ExpertMap
    dense: tuple[int, ...]
    ranges: Sequence[RowRange]
    n_frames: int
    room_share: float


def least_frames(experts: ExpertMap, n_used: int) -> int:
    """Return the fewest frames for experts: a prefill batch uses a whole tensor, a token `n_used` of a layer."""
    return experts.largest_tensor + 2 * n_used * max(experts.sizes)


def token_bytes(terms: Terms, tensors: Iterable[ExpertTensor], *, is_packed: bool) -> int:
    """Return the bytes on the drive, in the model or in its packed file, of the experts that a token uses."""
    size = used_experts(terms.gguf) * sum(tensor.stride for tensor in tensors)
    return int(size * terms.packed.share) if terms.packed and is_packed else size


def plan_moe(terms: Terms, graph: GraphMap, address_space: AddressSpace) -> MoePlan | None:
    """Return the plan of a mixture of experts that does not fit; None for a dense model, or where room is too small.

    Streaming by expert needs room for the weights that every token uses, and for the largest tensor of experts.
    """
    tensors = expert_tensors(graph, terms.gguf)
    if not tensors:
        return None
    chunk_bytes = expert_chunk_bytes(tensors, terms.budget_bytes)
    address_space = AddressSpace(address_space.spans, min(address_space.chunk_bytes, chunk_bytes))
    ranges = row_ranges(graph, address_space, terms.micro_batch_tokens)
    routed = {tensor.address for tensor in tensors}
    reads = (read for node in graph for read in node.reads if read.address not in routed)
    whole = (chunk for read in reads for chunk in chunks_of(read, address_space, ranges))
    dense = tuple(dict.fromkeys((*whole, *sorted(address_space.ragged))))
    experts = ExpertMap(tensors, address_space, frozenset(dense))

    rows = sum(r.budget_bytes for r in ranges)
    prediction = prediction_bytes(len(experts.layers), experts.n_experts) if terms.expert_prefetch != "off" else 0
    other = with_page_tables(terms.holdings.total_bytes + rows + prediction + terms.packed_bytes)
    chunk_cost = with_page_tables(address_space.chunk_bytes)
    n_used = used_experts(terms.gguf)
    in_use, least = n_used * max(experts.sizes), least_frames(experts, n_used)
    n_frames = (terms.budget_bytes - other) // chunk_cost - len(dense)
    if n_frames < least:
        return None
    layers = zip(experts.layers, experts.sizes, strict=True)
    everything = sum(layer[0].n_experts * size for layer, size in layers)
    n_frames = min(n_frames, everything + in_use)
    pinned, room = address_space.total_bytes(dense), n_frames * address_space.chunk_bytes
    used = token_bytes(terms, tensors, is_packed=True)
    room_share = room / sum(tensor.stride * tensor.n_experts for tensor in tensors)
    plan = make_plan(
        terms,
        mode="streamed",
        minimum_bytes=other + (len(dense) + least) * chunk_cost,
        pinned_bytes=pinned,
        expert_bytes=room,
        streamed_bytes_per_pass=int(used * (1 - hit_rate(terms.experience.points, room_share))),
        readers=terms.readers,
        items=(
            *items_besides_weights(terms, rows, pinned + room),
            PlanItem("pinned", pinned, "weights that every token needs: all but the experts"),
            PlanItem("prediction", prediction, "what is learnt of which experts follow which"),
            *(
                [PlanItem("packed", terms.packed_bytes, "to read packed experts and unpack them")]
                if terms.packed
                else []
            ),
            PlanItem("experts", room, "experts in use, and those that are likely to be used again"),
        ),
    )
    return MoePlan(plan, address_space, experts, dense, ranges, n_frames, room_share)
