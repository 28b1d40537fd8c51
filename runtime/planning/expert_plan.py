"""The plan of a mixture of experts that is streamed by expert."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_run.base.errors import BudgetError
from edge_run.base.results import ContextPoint, Plan, PlanItem
from edge_run.partition.plan import ResidencyPlan, named_minimum, reads_beside, too_small, with_lent
from edge_run.prefetch.experts import prediction_bytes
from edge_run.runtime.forecasting.routing import hit_rate
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.planning.budget_causes import cause_named
from edge_run.runtime.planning.experts import (
    Cuts,
    ExpertLayout,
    ExpertMap,
    ExpertTensor,
    expert_chunk_bytes,
    expert_tensors,
)
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
    layout: the weights in chunks of a size that suits the experts.
    ranges: the tables that are only read by row.
    n_frames: the frames of the experts.
    n_least: the fewest that they can do with.
    n_lent: the frames that are lent to them at most.
    room_share: the share of all experts' bytes that fits these frames together; 0 where dense weights stream too.
    residency: of the dense chunks, which stay and which stream; None where all stay.
    """

    plan: Plan
    layout: ExpertLayout
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


def plan_moe(terms: Terms, graph: GraphMap, address_space: AddressSpace, cuts: Cuts | None = None) -> MoePlan | None:
    """Return the plan of a mixture of experts that does not fit; None where a model has no experts to choose from.

    The larger the budget, the larger are its chunks, and what is needed at least is counted in whole ones. So a budget
    that is too small in chunks of its own size has those of the smallest budget that works. A plan for a larger one
    names a minimum of its own chunks, which works too: to cut a large model into small chunks takes seconds, which only
    a plan that is told takes (`planner.told`).

    cuts: has those of other plans of the model, and gets those of this one. Raises BudgetError below the minimum.
    """
    sharing = _fitting(terms, graph, address_space, cuts)
    return sharing.plan() if sharing else None


def moe_terms(terms: Terms, graph: GraphMap, address_space: AddressSpace, cuts: Cuts | None = None) -> Terms | None:
    """Return the terms of the plan of `plan_moe`, whose context has room; which weights stay takes longer to find."""
    sharing = _fitting(terms, graph, address_space, cuts)
    return sharing.terms if sharing else None


def _fitting(terms: Terms, graph: GraphMap, address_space: AddressSpace, cuts: Cuts | None) -> _Sharing | None:
    tensors = expert_tensors(graph, terms.gguf, has_row_slices=terms.has_row_slices)
    if not tensors:
        return None
    known, has_row_slices = cuts or Cuts(), terms.has_row_slices

    def chunk_bytes(budget_bytes: int) -> int:
        return min(address_space.chunk_bytes, expert_chunk_bytes(tensors, budget_bytes))

    def sharing(size: int) -> _Sharing:
        space = AddressSpace(address_space.spans, size, staying=address_space.staying)
        ranges = row_ranges(graph, space, terms.micro_batch_tokens, has_row_slices=has_row_slices)
        cut = functools.partial(ExpertLayout.of, graph, space, tensors, ranges, has_row_slices=has_row_slices)
        return _Sharing(terms, known.get(graph, space, ("experts", has_row_slices), cut), ranges)

    with contextlib.suppress(BudgetError):
        return sharing(chunk_bytes(terms.budget_bytes)).fitting()
    size = chunk_bytes(0)
    smallest = sharing(size)
    while (larger := chunk_bytes(smallest.least_bytes)) > size:
        size, smallest = larger, sharing(larger)
    return smallest.fitting()


class _Sharing:
    """Shares a budget between the experts of a model and its dense weights, which every token reads.

    All dense weights are pinned where there is room for them beside the fewest frames that experts can do with. Else
    they stream in the order of a pass, through a window of their own, and experts get as much as saves most reads.
    """

    def __init__(self, terms: Terms, layout: ExpertLayout, ranges: Sequence[RowRange]) -> None:
        """ranges: the tables that are only read by row."""
        self.terms, self._layout, self._ranges = terms, layout, ranges
        self._address_space, self._experts, self._dense = layout.address_space, layout.experts, layout.dense
        address_space, experts, dense = layout.address_space, layout.experts, layout.dense
        self._rows = sum(r.budget_bytes for r in ranges)
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
        terms = self.terms
        shortest = shortened(terms, terms.pool_bytes) or terms
        return self._other_bytes(shortest, 0) + self._least_chunks * self._chunk_cost

    @property
    def _least_chunks(self) -> int:
        """The chunks of the fewest frames for experts, and of the fewest for dense weights."""
        return self._least + self._layout.dense_plans.minimum_chunks

    def fitting(self) -> _Sharing:
        """Return the same for a context that has room, which is shorter where that asked for has none.

        Raises BudgetError, with the smallest budget that works, where even the shortest has none.
        """
        n_places = self._places(0)  # routers that stream are not there to predict with
        if self._pins_dense or n_places >= self._least_chunks:
            return self
        shorter = shortened(self.terms, max(1, self._least_chunks - n_places) * self._chunk_cost)
        if shorter is None:
            with cause_named(self.terms):
                raise self._refusal()
        return _Sharing(shorter, self._layout, self._ranges).fitting()

    def plan(self) -> MoePlan:
        """Return the plan, for which there must be room (`fitting`)."""
        if self._pins_dense:
            return self._with(min(self._places(self._prediction) - len(self._dense), self._most), None)
        n_places = self._places(0)
        residency = self._stream_dense(n_places)
        return self._with(min(n_places - len(residency.pinned) - residency.n_frames, self._most), residency)

    @property
    def _pins_dense(self) -> bool:
        """Whether all dense weights stay."""
        return self._places(self._prediction) - len(self._dense) >= self._least

    def _refusal(self) -> BudgetError:
        found_bytes, minimum_bytes = self.terms.budget_bytes, named_minimum(self.least_bytes)
        return too_small(found_bytes, minimum_bytes, self._other_bytes(self.terms, 0))

    def _places(self, prediction_bytes: int) -> int:
        """Return the chunks that the budget has room for, beside what is learnt for predictions."""
        return (self.terms.budget_bytes - self._other_bytes(self.terms, prediction_bytes)) // self._chunk_cost

    def _other_bytes(self, terms: Terms, prediction_bytes: int) -> int:
        held = terms.holdings.total_bytes + self._rows + self._books + prediction_bytes + terms.packed_bytes
        return with_page_tables(held)

    def _stream_dense(self, n_places: int) -> ResidencyPlan:
        """Return which dense chunks stay beside experts, in `n_places` chunks for both.

        What experts get is what saves most reads, of a few shares that are tried.
        """
        plans, n_lent = self._layout.dense_plans, self.terms.lent_bytes // self._chunk_cost
        most, least = min(n_places, self._most), self._least
        steps = (step / (_SHARES_TRIED - 1) for step in range(_SHARES_TRIED))
        shares = (round(least * (max(least, most) / least) ** step) for step in steps)

        def read_bytes(n_frames: int) -> int:
            n_reads = plans.least_reads(n_places - n_frames, n_lent)
            return n_reads * self._chunk_bytes + self._missing_bytes(n_frames * self._chunk_bytes)

        able = [n_frames for n_frames in shares if n_places - n_frames >= plans.minimum_chunks]
        return with_lent(plans.plan(n_places - min(able, key=read_bytes)), self._layout.needs, n_lent)

    def _missing_bytes(self, room_bytes: int) -> int:
        """Return what a token reads of experts that have `room_bytes`, if they are chosen as in earlier runs."""
        return int(self._used_bytes * (1 - hit_rate(self.terms.experience.points, room_bytes / self._all_bytes)))

    def _with(self, n_frames: int, residency: ResidencyPlan | None) -> MoePlan:
        """Return the plan in which experts have `n_frames`. residency: of dense weights that stream."""
        terms, address_space, chunk_bytes = self.terms, self._address_space, self._chunk_bytes
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
        dense_reads = reads_beside(residency, self._layout.needs, [*kept, 0]) if residency else [0] * (len(kept) + 1)
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
            layout=self._layout,
            ranges=self._ranges,
            n_frames=n_frames,
            n_least=self._least,
            n_lent=n_lent,
            room_share=room_share,
            residency=residency,
        )
