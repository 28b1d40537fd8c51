"""The plan of a mixture of experts that is streamed by expert."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_run.base.errors import BudgetError
from edge_run.base.results import ContextPoint, Plan, PlanItem
from edge_run.partition.plan import ResidencyPlan, named_minimum, plan_residency, reads_beside, too_small, with_lent
from edge_run.partition.window import frames_needed
from edge_run.prefetch.experts import prediction_bytes
from edge_run.runtime.forecasting.routing import hit_rate
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.graph.segments import chunks_of
from edge_run.runtime.planning.budget_causes import cause_named
from edge_run.runtime.planning.experts import DensePart, ExpertMap, ExpertTensor, expert_chunk_bytes, expert_tensors
from edge_run.runtime.planning.memory_plan import items_besides_weights, make_plan, row_ranges, with_page_tables
from edge_run.runtime.planning.spill_terms import shortened
from edge_run.runtime.planning.terms import Terms
from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.rows import RowRange

CHUNK_BOOK_BYTES = 12  # its state and its checksum, of experts and of dense weights apart, and how many hold it
DENSE_BOOK_BYTES = 280  # of each dense chunk besides: its places in the order of a pass, and in segments
PIECE_BOOK_BYTES = 200  # of each expert in each tensor: which chunks it has
_SHARES_TRIED = 8


@dataclass(frozen=True, slots=True)
class MoePlan:
    """The plan of a model that is streamed by expert.

    plan: what the user sees of it.
    address_space: the weights in chunks of a size that suits the experts.
    experts: the chunks of each expert.
    dense: the chunks that every token needs: all weights but the experts, in order of use, and what cannot move.
    ranges: the tables that are only read by row.
    n_frames: the frames of the experts.
    n_least: the fewest that they can do with.
    n_lent: the frames that are lent to them at most.
    room_share: the share of all experts' bytes that fits these frames together; 0 where dense weights stream too.
    residency: of the dense chunks, which stay and which stream; None where all stay.
    """

    plan: Plan
    address_space: AddressSpace
    experts: ExpertMap
    dense: tuple[int, ...]
    ranges: Sequence[RowRange]
    n_frames: int
    n_least: int
    n_lent: int
    room_share: float
    residency: ResidencyPlan | None


def least_frames(experts: ExpertMap, n_used: int, n_tokens: int) -> int:
    """Return the fewest frames for experts: for the pieces of a token in one tensor, and for a pass of `n_tokens`.

    Such a pass does with some rows of its experts where products are computed in slices.
    """
    of_token = max(experts.size_at_once(tensor, n_used) for tensor in experts.at.values())
    n_experts = n_used * n_tokens
    of_pass = max(experts.least_at_once(t, min(t.n_experts, n_experts)) for t in experts.at.values())
    return max(of_token, of_pass)


def token_bytes(terms: Terms, tensors: Iterable[ExpertTensor], *, is_packed: bool) -> int:
    """Return the bytes on the drive, in the model or in its packed file, of the experts that a token uses."""
    size = terms.gguf.used_experts * sum(tensor.stride for tensor in tensors)
    return int(size * terms.packed.share) if terms.packed and is_packed else size


def plan_moe(terms: Terms, graph: GraphMap, address_space: AddressSpace) -> MoePlan | None:
    """Return the plan of a mixture of experts that does not fit; None where a model has no experts to choose from.

    The larger the budget, the larger are its chunks, and what is needed at least is counted in whole ones. So a budget
    that is too small in chunks of its own size has those of the smallest budget that works. A plan for a larger one
    names a minimum of its own chunks, which works too: to cut a large model into small chunks takes seconds, which only
    a plan that is told takes (`planner.told`).

    Raises BudgetError below the minimum.
    """
    tensors = expert_tensors(graph, terms.gguf, has_row_slices=terms.has_row_slices)
    if not tensors:
        return None

    def chunk_bytes(budget_bytes: int) -> int:
        return min(address_space.chunk_bytes, expert_chunk_bytes(tensors, budget_bytes))

    def sharing(size: int) -> _Sharing:
        return _sharing(terms, graph, AddressSpace(address_space.spans, size, staying=address_space.staying), tensors)

    with contextlib.suppress(BudgetError):
        return sharing(chunk_bytes(terms.budget_bytes)).plan()
    size = chunk_bytes(0)
    smallest = sharing(size)
    while (larger := chunk_bytes(smallest.least_bytes)) > size:
        size, smallest = larger, sharing(larger)
    return smallest.plan()


def _sharing(terms: Terms, graph: GraphMap, address_space: AddressSpace, tensors: Sequence[ExpertTensor]) -> _Sharing:
    """Return how the budget is shared between experts and the other weights, in the chunks of `address_space`.

    tensors: of the experts.
    """
    ranges = row_ranges(graph, address_space, terms.micro_batch_tokens, has_row_slices=terms.has_row_slices)
    routed = {tensor.address for tensor in tensors}
    reads = (read for node in graph for read in node.reads if read.address not in routed)
    whole = (chunk for read in reads for chunk in chunks_of(read, address_space, ranges))
    dense = tuple(dict.fromkeys((*whole, *sorted(address_space.unmovable))))
    experts = ExpertMap(tensors, address_space, frozenset(dense))

    part = DensePart.of(experts, dense, has_row_slices=terms.has_row_slices)
    needs = [segment.needs for segment in part.segments(graph, address_space, ranges)]
    return _Sharing(terms, address_space, experts, dense, ranges, needs, part.segment_chunks)


class _Sharing:
    """Shares a budget between the experts of a model and its dense weights, which every token reads.

    All dense weights are pinned where there is room for them beside the fewest frames that experts can do with. Else
    they stream in the order of a pass, through a window of their own, and experts get as much as saves most reads.
    """

    def __init__(
        self,
        terms: Terms,
        address_space: AddressSpace,
        experts: ExpertMap,
        dense: tuple[int, ...],
        ranges: Sequence[RowRange],
        needs: Sequence[Sequence[int]],
        segment_chunks: int,
    ) -> None:
        """needs: the dense chunks that each segment of a pass needs, at most `segment_chunks` or one matrix."""
        self._needs, self._segment_chunks = needs, segment_chunks
        self._terms, self._address_space, self._experts, self._dense = terms, address_space, experts, dense
        self._ranges, self._rows = ranges, sum(r.budget_bytes for r in ranges)
        is_learnt = terms.expert_prefetch != "off"
        self._prediction = prediction_bytes(len(experts.layers), experts.n_experts) if is_learnt else 0
        n_pieces = sum(tensor.n_experts for tensor in experts.at.values())
        self._books = CHUNK_BOOK_BYTES * address_space.n_chunks + PIECE_BOOK_BYTES * n_pieces
        self._books += DENSE_BOOK_BYTES * len(dense)
        self._chunk_bytes = address_space.chunk_bytes
        self._chunk_cost = with_page_tables(self._chunk_bytes)
        n_used = terms.gguf.used_experts
        self._least = least_frames(experts, n_used, terms.micro_batch_tokens)
        layers = zip(experts.layers, experts.sizes, strict=True)
        self._most = sum(layer[0].n_experts * size for layer, size in layers) + n_used * max(experts.sizes)
        tensors = experts.at.values()
        self._used_bytes = token_bytes(terms, tensors, is_packed=True)
        self._all_bytes = sum(tensor.stride * tensor.n_experts for tensor in tensors)

    @property
    def least_bytes(self) -> int:
        """The smallest budget that works, with the shortest context."""
        terms = self._terms
        shortest = shortened(terms, terms.pool_bytes) or terms
        return self._other_bytes(shortest, 0) + self._least_chunks * self._chunk_cost

    @property
    def _least_chunks(self) -> int:
        """The chunks of the fewest frames for experts, and of the largest segment of dense weights."""
        unmovable = self._address_space.unmovable
        window = frames_needed(self._needs, set(self._dense) - unmovable, self._segment_chunks)
        return self._least + window + len(unmovable)

    def plan(self) -> MoePlan:
        """Return the plan, for a shorter context where that asked for has no room.

        Raises BudgetError, with the smallest budget that works, where even the shortest has none.
        """
        n_places = self._places(self._prediction)
        if n_places - len(self._dense) >= self._least:
            return self._with(min(n_places - len(self._dense), self._most), None)
        n_places = self._places(0)  # routers that stream are not there to predict with
        residency = self._stream_dense(n_places)
        if residency:
            n_held = len(residency.pinned) + residency.n_frames
            return self._with(min(n_places - n_held, self._most), residency)
        shorter = shortened(self._terms, max(1, self._least_chunks - n_places) * self._chunk_cost)
        if shorter is None:
            with cause_named(self._terms):
                raise self._refusal()
        return self._for(shorter).plan()

    def _refusal(self) -> BudgetError:
        found_bytes, minimum_bytes = self._terms.budget_bytes, named_minimum(self.least_bytes)
        return too_small(found_bytes, minimum_bytes, self._other_bytes(self._terms, 0))

    def _for(self, terms: Terms) -> _Sharing:
        dense, ranges, needs = self._dense, self._ranges, self._needs
        return _Sharing(terms, self._address_space, self._experts, dense, ranges, needs, self._segment_chunks)

    def _places(self, prediction_bytes: int) -> int:
        """Return the chunks that the budget has room for, beside what is learnt for predictions."""
        return (self._terms.budget_bytes - self._other_bytes(self._terms, prediction_bytes)) // self._chunk_cost

    def _other_bytes(self, terms: Terms, prediction_bytes: int) -> int:
        held = terms.holdings.total_bytes + self._rows + self._books + prediction_bytes + terms.packed_bytes
        return with_page_tables(held)

    def _stream_dense(self, n_places: int) -> ResidencyPlan | None:
        """Return which dense chunks stay beside experts, in `n_places` chunks for both; None for too few."""
        found: tuple[float, ResidencyPlan] | None = None
        needs, most = self._needs, max(self._least, min(n_places, self._most))
        for step in range(_SHARES_TRIED):
            n_frames = round(self._least * (most / self._least) ** (step / (_SHARES_TRIED - 1)))
            try:
                available = (n_places - n_frames) * self._chunk_cost
                residency = plan_residency(
                    needs,
                    self._address_space.unmovable,
                    self._chunk_cost,
                    available,
                    0,
                    segment_chunks=self._segment_chunks,
                )
            except BudgetError:
                break  # more for experts leaves less for these
            residency = with_lent(residency, needs, self._terms.lent_bytes // self._chunk_cost)
            read = residency.streamed_uses * self._chunk_bytes + self._missing_bytes(n_frames * self._chunk_bytes)
            if found is None or read < found[0]:
                found = read, residency
        return found[1] if found else None

    def _missing_bytes(self, room_bytes: int) -> int:
        """Return what a token reads of experts that have `room_bytes`, if they are chosen as in earlier runs."""
        return int(self._used_bytes * (1 - hit_rate(self._terms.experience.points, room_bytes / self._all_bytes)))

    def _with(self, n_frames: int, residency: ResidencyPlan | None) -> MoePlan:
        """Return the plan in which experts have `n_frames`. residency: of dense weights that stream."""
        terms, address_space, chunk_bytes = self._terms, self._address_space, self._chunk_bytes
        if residency:
            pinned, window = address_space.total_bytes(residency.pinned), residency.n_frames * chunk_bytes
            n_lent, dense_read = 0, residency.streamed_uses * chunk_bytes
            lent_bytes = len(residency.lent) * chunk_bytes
        else:
            pinned, window, dense_read = address_space.total_bytes(self._dense), 0, 0
            n_lent = min(terms.lent_bytes // self._chunk_cost, self._most - n_frames)
            lent_bytes = n_lent * chunk_bytes
        room = n_frames * chunk_bytes
        steps = terms.context_steps if lent_bytes or terms.away_bytes else []
        kept = [min(lent_bytes // chunk_bytes, terms.loans_at(tokens, self._chunk_cost)) for tokens in steps]
        dense_reads = reads_beside(residency, self._needs, [*kept, 0]) if residency else [0] * (len(kept) + 1)
        points = []
        for tokens, n_kept, n_reads in zip(steps, kept, dense_reads, strict=False):
            kept_bytes = n_kept * chunk_bytes
            read = n_reads * chunk_bytes + self._missing_bytes(room if residency else room + kept_bytes)
            weights_bytes, kv_read = pinned + room + kept_bytes, terms.kv_read_at(tokens)
            points.append(ContextPoint(tokens, weights_bytes, read, kv_bytes_per_pass=kv_read))
        why = "weights that every token needs: all but the experts"
        packed = PlanItem("packed", terms.packed_bytes, "to read packed experts and unpack them")
        plan = make_plan(
            terms,
            mode="streamed",
            minimum_bytes=self.least_bytes,
            pinned_bytes=pinned,
            window_bytes=window,
            expert_bytes=room,
            streamed_bytes_per_pass=dense_read + self._missing_bytes(room + n_lent * chunk_bytes),
            streamed_bytes_per_batch=dense_reads[-1] * chunk_bytes,
            readers=terms.readers,
            lent_bytes=lent_bytes,
            by_context=tuple(points),
            items=(
                *items_besides_weights(terms, self._rows, pinned + window + room),
                PlanItem(
                    "pinned", pinned, "of the weights that every token needs, those that stay" if residency else why
                ),
                PlanItem("window", window, "frames that the others of them flow through")
                if residency
                else PlanItem("prediction", self._prediction, "what is learnt of which experts follow which"),
                PlanItem("books", self._books, "what is noted of each chunk of the model"),
                *([packed] if terms.packed else []),
                PlanItem("experts", room, "experts in use, and those that are likely to be used again"),
            ),
        )
        room_share = 0.0 if residency else (room + lent_bytes) / self._all_bytes
        return MoePlan(
            plan=plan,
            address_space=address_space,
            experts=self._experts,
            dense=self._dense,
            ranges=self._ranges,
            n_frames=n_frames,
            n_least=self._least,
            n_lent=n_lent,
            room_share=room_share,
            residency=residency,
        )
