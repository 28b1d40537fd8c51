"""Streaming as a feature of a pass: each segment of the graph acquires its weights, and releases them at its end."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from edge_run.partition.plan import NOTHING_STAYS, ResidencyPlan
from edge_run.prefetch.schedule import Segment, join_stage_visits
from edge_run.runtime.decoding.driver import Step, Steps
from edge_run.runtime.graph.nodes import GraphMap, Node, WeightRead
from edge_run.runtime.graph.segments import chunks_of, cut_into_segments, slices_of
from edge_run.runtime.llama.row_products import RowProducts
from edge_run.runtime.planning.experts import DensePart
from edge_run.runtime.planning.memory_plan import with_page_tables
from edge_run.runtime.streaming.lookups import Lookups
from edge_run.runtime.streaming.row_slices import RowSlice, leave_out, product_step
from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.weights import WeightsInOrder, WeightsOnDemand


class WeightStreaming:
    """The feature that streams weights in order; it also acquires the weights that are copied to a GPU (`Carrier`).

    It is over 200 lines because segments, row slices, nodes of unknown graphs and copies share one account of what is
    held.

    lent: the chunks that stay while they have lent memory.
    holds_stage_visits: whether there are frames for all that streams of a stage visit, while those chunks stay that are
        always lent (`StageVisits`).
    """

    def __init__(
        self,
        weights: WeightsInOrder | WeightsOnDemand,
        address_space: AddressSpace,
        lookups: Lookups | None = None,
        residency: ResidencyPlan = NOTHING_STAYS,
        part: DensePart | None = None,
        products: RowProducts | None = None,
        cut: tuple[GraphMap, Sequence[Segment]] | None = None,
    ) -> None:
        """Stream `weights`, except what is only looked up by row.

        lookups: the lookups of rows. residency: which chunks stay. part: the only part of the model that is streamed;
        None for all of it. products: computes products with large matrices in slices of rows; None where such a matrix
        is held whole. cut: a graph and its segments, where it was cut already.
        """
        self.weights, self._address_space, self._lookups = weights, address_space, lookups or Lookups(())
        self.lent, self.holds_stage_visits = residency.lent, residency.by_stage_visits
        self._always_lent = residency.lent[: residency.n_always_lent]
        self._pinned, spare = frozenset(residency.pinned), residency.spare
        self._fixed, self._in_turn = self._pinned.difference(spare), (*reversed(spare), *self.lent)
        self._n_spare, self._n_borrowed, self._part, self._products = len(spare), 0, part, products
        self._most_chunks = part.segment_chunks if part else residency.segment_chunks
        self._unknown_product: Callable[[], None] | None = None
        self._held: Counter[int] = Counter()  # how often: a segment may need what is copied to a GPU
        self._being_copied: Counter[int] = Counter()
        self._cut = cut
        self._wait_s = 0.0

    @property
    def wait_s(self) -> float:
        """How long passes waited for weights."""
        return self._wait_s + self._lookups.wait_s

    @property
    def most_loans(self) -> int:
        """Loans that it has a use for; each is of `loan_bytes`."""
        return len(self.lent)

    @property
    def least_loans(self) -> int:
        """Fewer than none, where it can do with fewer chunks of its own."""
        return -self._n_spare

    @property
    def may_hold_stage_visits(self) -> bool:
        """Whether the next pass may: not while a limit that fell takes what is always lent otherwise."""
        return self.holds_stage_visits and self._n_borrowed >= len(self._always_lent)

    @property
    def loan_bytes(self) -> int:
        """A chunk, and what the kernel keeps to map it."""
        return with_page_tables(self._address_space.chunk_bytes)

    def segments(self, graph: GraphMap) -> Sequence[Segment]:
        """Return the segments of `graph`; those of the last graph are cached."""
        if self._cut is None or self._cut[0] is not graph:
            sliced = self._address_space if self._products else None
            self._cut = graph, cut_into_segments(graph, self._chunks_of, self._most_chunks, sliced)
        return self._cut[1]

    def borrow(self, n_loans: int) -> None:
        """Let the first `n_loans` of the lent stay from now on, and the others stream; only between passes.

        Where they are fewer than none, so many pinned chunks stream too.
        """
        before, after = (self._n_spare + n for n in (self._n_borrowed, n_loans))
        weights = cast("WeightsInOrder", self.weights)  # those on demand have nothing to lend or to spare here
        if after > before:
            weights.pin(self._in_turn[before:after])
        elif after < before:
            weights.unpin(self._in_turn[after:before])
        if min(before, after) < self._n_spare:
            self._pinned = self._fixed.union(self._in_turn[: min(after, self._n_spare)])
        self._n_borrowed = n_loans

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Acquire chunks before each segment, and release them after it; fetch rows where rows are looked up."""
        self._lookups.register(graph, steps)
        products: dict[int, list[Segment]] = {}
        for segment in self.segments(graph):
            if segment.rows:
                products.setdefault(segment.first, []).append(segment)
            else:
                steps.add_before(segment.first, self._acquire_step(segment.acquire))
                steps.add_after(segment.last, self._release_step(segment.release))
        for ordinal, slices in products.items():
            steps.add_before(ordinal, leave_out)
            steps.add_after(ordinal, self._product_step(slices))

    def register_stage_visits(self, graph: GraphMap, steps: Steps) -> None:
        """Acquire all chunks before each stage visit; release them after the last node that needs a streamed one."""
        self._lookups.register(graph, steps)
        segments = self.segments(graph)
        for visit in join_stage_visits(segments, [i for i, node in enumerate(graph) if node.is_border]):
            steps.add_before(visit.first, self._acquire_step(visit.acquire))
            steps.add_after(self._last_need(visit, segments), self._release_step(visit.release, is_visit_end=True))

    def _last_need(self, visit: Segment, segments: Sequence[Segment]) -> int:
        """Return the last node of the last segment in `visit` that needs a chunk that does not stay."""
        staying = self._pinned.union(self._always_lent)
        parts = (one for one in segments if visit.first <= one.first and not staying.issuperset(one.needs))
        return max((part.last for part in parts if part.last <= visit.last), default=visit.last)

    def before_unknown(self, node: Node, address: int) -> bool:
        """Acquire the chunks that `node` reads; stop after it when it reads weights that are not copied."""
        is_left_out = self._lookups.before_unknown(node, address)
        if self._products and (slices := slices_of(node, self._address_space, self._most_chunks)):
            leave_out(address)
            parts = [(rows, tuple(self._chunks_of(read))) for rows, read in slices]
            product = self._product_step([Segment(0, 0, chunks, chunks, chunks, rows) for rows, chunks in parts])
            self._unknown_product = partial(product, address)
            return True
        self._acquire_for(node)
        return is_left_out or any(not read.is_copied for read in node.reads)

    def after_unknown(self) -> None:
        """Release all chunks but those that are being copied; compute a product that is computed in slices."""
        self._lookups.after_unknown()
        product, self._unknown_product = self._unknown_product, None
        if product:
            product()
        self._release(tuple((self._held - self._being_copied).elements()))

    def abandon(self) -> None:
        """Release all chunks."""
        self._unknown_product = None
        self._being_copied.clear()
        self._release(tuple(self._held.elements()))

    def close(self) -> None:
        """Free what is looked up by row, when no reader is at work any more. Idempotent."""
        self._lookups.close()

    def bring(self, reads: Sequence[WeightRead]) -> None:
        """Acquire the weights that are copied to a GPU."""
        chunks = self._chunks_copied(reads)
        self._acquire(chunks)
        self._being_copied.update(chunks)

    def let_go(self, reads: Sequence[WeightRead]) -> None:
        """Release the weights that were copied."""
        self._being_copied.clear()
        self._release(self._chunks_copied(reads))

    def expose(self) -> None:
        """Make all chunks but those inside tables readable until `hide`; missing ones read as zeros."""
        inside = (self._address_space.chunks_of(r.start, r.length) for r in self._lookups.ranges)
        self.weights.expose(frozenset(itertools.chain(*inside)))

    def hide(self) -> None:
        """Undo `expose`."""
        self.weights.hide()

    def _chunks_of(self, read: WeightRead) -> Iterable[int]:
        return () if read.is_copied else self._copied_chunks(read)

    def _copied_chunks(self, read: WeightRead) -> Iterable[int]:
        chunks = chunks_of(read, self._address_space, self._lookups.ranges)
        return self._part.needs(read, chunks) if self._part else chunks

    def _chunks_copied(self, reads: Sequence[WeightRead]) -> list[int]:
        return sorted({chunk for read in reads for chunk in self._copied_chunks(read)})

    def _product_step(self, slices: Sequence[Segment]) -> Step:
        """Return the step that computes the product of a node whose matrix streams in `slices`."""
        assert self._products
        rank = {chunk: number - self._n_spare for number, chunk in enumerate(self._in_turn, 1)}
        row_slices = [
            RowSlice(
                one.rows or range(0),
                self._acquire_step(one.acquire),
                self._release_step(one.release),
                max(-self._n_spare if c in self._fixed else rank.get(c, len(rank) + 1) for c in one.needs),
            )
            for one in slices
        ]
        return product_step(self._products, row_slices, lambda: self._n_borrowed)

    def _acquire_step(self, chunks: tuple[int, ...]) -> Step:
        there: frozenset[int] | None = None
        leaving = chunks

        def acquire(_: int) -> None:
            nonlocal there, leaving
            if there is self._pinned:
                self._acquire(leaving)
                return
            self._acquire(chunks)
            self._release(tuple(self._pinned.intersection(chunks)))
            there, leaving = self._pinned, self._leaving(chunks)  # what is pinned is there while it is

        return acquire

    def _release_step(self, chunks: tuple[int, ...], is_visit_end: bool = False) -> Step:
        pinned, leaving = self._pinned, self._leaving(chunks)

        def release(_: int) -> None:
            nonlocal pinned, leaving
            if pinned is not self._pinned:
                pinned, leaving = self._pinned, self._leaving(chunks)
            self._release(leaving, is_visit_end)

        return release

    def _leaving(self, chunks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(chunk for chunk in chunks if chunk not in self._pinned)

    def _acquire_for(self, node: Node) -> None:
        self._acquire(list(dict.fromkeys(chunk for read in node.reads for chunk in self._chunks_of(read))))

    def _acquire(self, chunks: Sequence[int]) -> None:
        held = self._held
        if missing := [chunk for chunk in chunks if chunk not in held]:
            self._wait_s += self.weights.acquire(missing)
        for chunk in dict.fromkeys(chunks):  # Counter's own methods take longer than all else here
            held[chunk] = held.get(chunk, 0) + 1

    def _release(self, chunks: Sequence[int], is_visit_end: bool = False) -> None:
        """Release `chunks`; at the end of a stage visit, where frames are not urgent, a reader does it."""
        gone = dict[int, None]()
        for chunk in chunks:
            if (uses := self._held.pop(chunk, 0) - 1) > 0:
                self._held[chunk] = uses
            else:
                gone[chunk] = None
        if gone:
            (self.weights.release_soon if is_visit_end else self.weights.release)(gone)


@dataclass(frozen=True, slots=True)
class StageVisits:
    """The steps of `streaming` for passes that may hold all chunks of a stage visit from its start."""

    streaming: WeightStreaming

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Add the steps for `graph`, by stage visits."""
        self.streaming.register_stage_visits(graph, steps)


class PinnedWeights(WeightStreaming):
    """The feature for weights that stay once they are in memory: no later pass stops for them."""

    def __init__(
        self,
        weights: WeightsInOrder | WeightsOnDemand,
        address_space: AddressSpace,
        lookups: Lookups,
        part: DensePart | None = None,
    ) -> None:
        """Read the weights once; of a model whose experts stream, only its dense `part`."""
        super().__init__(weights, address_space, lookups, part=part)

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Wait for the weights of each segment, the first time; fetch rows where rows are looked up."""
        self._lookups.register(graph, steps)
        for segment in self.segments(graph):
            steps.add_before(segment.first, self._acquire_step(segment.acquire))

    def before_unknown(self, node: Node, address: int) -> bool:
        """Acquire the chunks that `node` reads; a stop is needed only where the node is left out."""
        self._acquire_for(node)
        return self._lookups.before_unknown(node, address)

    def _acquire_step(self, chunks: tuple[int, ...]) -> Step:
        are_there = False

        def acquire(_: int) -> None:
            nonlocal are_there
            if not are_there:
                self._acquire(chunks)
                are_there = True

        return acquire

    def _acquire(self, chunks: Sequence[int]) -> None:
        super()._acquire([chunk for chunk in chunks if chunk not in self._held])

    def _release(self, chunks: Sequence[int], is_visit_end: bool = False) -> None:
        """Release nothing: the weights stay."""
