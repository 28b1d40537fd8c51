"""Streaming as a feature of a pass: each segment of the graph acquires its weights, and releases them at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from edge_run.prefetch.schedule import Segment, join_stage_visits
from edge_run.runtime.decoding.driver import Step, Steps
from edge_run.runtime.graph.nodes import GraphMap, Node, WeightRead
from edge_run.runtime.graph.observer import looked_up_rows
from edge_run.runtime.graph.segments import chunks_of, cut_into_segments, table_of
from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.rows import RowTable
from edge_run.tiers.weights import Weights


class WeightStreaming:
    """The feature that streams weights in order; it also acquires the weights that are copied to a GPU (`Carrier`).

    wait_s: how long passes waited for weights.
    pinned: the chunks that stay.
    lent: the chunks that stay while they have lent memory.
    holds_stage_visits: whether all chunks of a stage visit are held from its start in passes in which the lent chunks
        stay (`StageVisits`).
    """

    def __init__(
        self,
        weights: Weights,
        address_space: AddressSpace,
        tables: Sequence[RowTable] = (),
        pinned: Collection[int] = (),
        lent: Sequence[int] = (),
        holds_stage_visits: bool = False,
    ) -> None:
        """Stream `weights`, except the chunks inside the `tables`, whose rows are fetched one by one."""
        self.weights, self._address_space, self._tables = weights, address_space, tables
        self._pinned, self.lent, self.holds_stage_visits = frozenset(pinned), lent, holds_stage_visits
        self._held: Counter[int] = Counter()  # how often: a segment may need what is copied to a GPU
        self._being_copied: Counter[int] = Counter()
        self._cut: tuple[GraphMap, list[Segment]] | None = None
        self.wait_s = 0.0

    def segments(self, graph: GraphMap) -> list[Segment]:
        """Return the segments of `graph`; those of the last graph are cached."""
        if self._cut is None or self._cut[0] is not graph:
            self._cut = graph, cut_into_segments(graph, self._chunks_of)
        return self._cut[1]

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Acquire chunks before each segment, and release them after it; fetch rows where rows are looked up."""
        self._register_fetches(graph, steps)
        for segment in self.segments(graph):
            steps.add_before(segment.first, self._acquire_step(segment.acquire))
            steps.add_after(segment.last, self._release_step(segment.release))

    def register_stage_visits(self, graph: GraphMap, steps: Steps) -> None:
        """Acquire all chunks before each stage visit; release them after the last node that needs a streamed one."""
        self._register_fetches(graph, steps)
        segments = self.segments(graph)
        for visit in join_stage_visits(segments, [i for i, node in enumerate(graph) if node.is_border]):
            steps.add_before(visit.first, self._acquire_step(visit.acquire))
            steps.add_after(self._last_need(visit, segments), self._release_step(visit.release, is_visit_end=True))

    def _last_need(self, visit: Segment, segments: Sequence[Segment]) -> int:
        """Return the last node of the last segment in `visit` that needs a chunk that does not stay."""
        staying = self._pinned.union(self.lent)
        parts = (one for one in segments if visit.first <= one.first and not staying.issuperset(one.needs))
        return max((part.last for part in parts if part.last <= visit.last), default=visit.last)

    def before_unknown(self, node: Node, address: int) -> bool:
        """Acquire the chunks that `node` reads; stop after it when it reads weights that are not copied."""
        if fetch := self._fetch_step(node):
            fetch(address)
        self._acquire(list(dict.fromkeys(chunk for read in node.reads for chunk in self._chunks_of(read))))
        return any(not read.is_copied for read in node.reads)

    def after_unknown(self) -> None:
        """Release all chunks but those that are being copied."""
        self._release(tuple((self._held - self._being_copied).elements()))

    def abandon(self) -> None:
        """Release all chunks."""
        self._being_copied.clear()
        self._release(tuple(self._held.elements()))

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
        self.weights.expose(frozenset(chunk for table in self._tables for chunk in self._chunks_inside(table)))

    def hide(self) -> None:
        """Undo `expose`."""
        self.weights.hide()

    def _chunks_of(self, read: WeightRead) -> Iterable[int]:
        return () if read.is_copied else self._copied_chunks(read)

    def _copied_chunks(self, read: WeightRead) -> Iterable[int]:
        return chunks_of(read, self._address_space, self._tables)

    def _chunks_copied(self, reads: Sequence[WeightRead]) -> list[int]:
        return sorted({chunk for read in reads for chunk in self._copied_chunks(read)})

    def _chunks_inside(self, table: RowTable) -> Iterable[int]:
        return self._address_space.chunks_of(table.start, table.stop - table.start)

    def _register_fetches(self, graph: GraphMap, steps: Steps) -> None:
        for i, node in enumerate(graph):
            if fetch := self._fetch_step(node):
                steps.add_before(i, fetch)

    def _fetch_step(self, node: Node) -> Step | None:
        read = next((read for read in node.reads if read.row_bytes), None)
        number = table_of(read, self._tables) if read else None
        if read is None or number is None:
            return None
        table = self._tables[number]

        def fetch(address: int) -> None:
            rows = looked_up_rows(address)
            self.wait_s += table.fetch((read.address + row * read.row_bytes, read.row_bytes) for row in rows)

        return fetch

    def _acquire_step(self, chunks: tuple[int, ...]) -> Step:
        leaving, may_lack = self._leaving(chunks), True

        def acquire(_: int) -> None:
            nonlocal may_lack
            self._acquire(chunks if may_lack else leaving)
            if may_lack:
                self._release(tuple(self._pinned.intersection(chunks)))
                may_lack = False  # what is pinned is there from now on

        return acquire

    def _release_step(self, chunks: tuple[int, ...], is_visit_end: bool = False) -> Step:
        leaving = self._leaving(chunks)
        return lambda _: self._release(leaving, is_visit_end)

    def _leaving(self, chunks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(chunk for chunk in chunks if chunk not in self._pinned)

    def _acquire(self, chunks: Sequence[int]) -> None:
        self.wait_s += self.weights.acquire([chunk for chunk in chunks if chunk not in self._held])
        self._held.update(dict.fromkeys(chunks, 1))

    def _release(self, chunks: Sequence[int], is_visit_end: bool = False) -> None:
        """Release `chunks`; at the end of a stage visit, where frames are not urgent, a reader does it."""
        self._held.subtract(chunks)
        gone = [chunk for chunk in dict.fromkeys(chunks) if self._held[chunk] <= 0]
        for chunk in gone:
            del self._held[chunk]
        (self.weights.release_soon if is_visit_end else self.weights.release)(gone)


@dataclass(frozen=True, slots=True)
class StageVisits:
    """The steps of `streaming` for passes in which the lent chunks stay."""

    streaming: WeightStreaming

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Add the steps for `graph`, by stage visits where the frames hold these, else by segments."""
        add = self.streaming.register_stage_visits if self.streaming.holds_stage_visits else self.streaming.register
        add(graph, steps)


class PinnedWeights(WeightStreaming):
    """The feature for weights that stay once they are in memory: no later pass stops for them."""

    def __init__(
        self,
        weights: Weights,
        address_space: AddressSpace,
        tables: Sequence[RowTable],
        routed: Collection[int] = (),
        pinned: Collection[int] = (),
    ) -> None:
        """Read the weights once.

        routed: the addresses of weights that stream by expert.
        pinned: the chunks that stay, which may hold parts of these weights too.
        """
        super().__init__(weights, address_space, tables)
        self._routed, self._pinned_chunks = routed, frozenset(pinned)

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Wait for the weights of each segment, the first time; fetch rows where rows are looked up."""
        self._register_fetches(graph, steps)
        for segment in self.segments(graph):
            steps.add_before(segment.first, self._acquire_step(segment.acquire))

    def before_unknown(self, node: Node, address: int) -> bool:
        """Acquire the chunks that `node` reads; no stop is needed."""
        super().before_unknown(node, address)
        return False

    def _chunks_of(self, read: WeightRead) -> Iterable[int]:
        chunks = super()._chunks_of(read)
        return (c for c in chunks if c in self._pinned_chunks) if read.address in self._routed else chunks

    def _acquire(self, chunks: Sequence[int]) -> None:
        super()._acquire([chunk for chunk in chunks if chunk not in self._held])

    def _release(self, chunks: Sequence[int], is_visit_end: bool = False) -> None:
        """Release nothing: the weights stay."""
