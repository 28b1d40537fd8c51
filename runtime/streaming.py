"""Streaming as a feature of a pass: each stretch of the graph waits for its weights, and gives them back when computed.

The graph is cut into stretches of a few MiB of weights (a large matrix is a stretch of its own), so that the window is
small and reads overlap with computing. A stretch is only cut before a matrix multiplication: elsewhere a cut could
separate nodes that ggml fuses, and the sums would differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from edge_run.prefetch.schedule import STRETCH_CHUNKS, Stretch, schedule_pass
from edge_run.runtime.driver import Step, Steps
from edge_run.runtime.graph import GraphMap, Node, WeightRead, looked_up_rows
from edge_run.tiers.rows import RowTable
from edge_run.tiers.territory import Territory
from edge_run.tiers.weights import Weights

CUT_BEFORE = frozenset({"MUL_MAT", "MUL_MAT_ID"})

ChunksOf = Callable[[WeightRead], Iterable[int]]


def cut_into_stretches(graph: GraphMap, chunks_of: ChunksOf, stretch_chunks: int = STRETCH_CHUNKS) -> list[Stretch]:
    """Return the stretches of `graph`, cut only before matrix multiplications."""
    nothing = frozenset[int]()
    needs = [nothing.union(*map(chunks_of, node.reads)) for node in graph]
    return schedule_pass(needs, [node.op in CUT_BEFORE for node in graph], stretch_chunks)


class WeightStreaming:
    """The feature. `tables` and `weights` are set once they are planned; the chunks inside a table are never streamed.

    check runs while a pass waits for weights and may raise to stop it. wait_s counts those waits.
    """

    def __init__(self, territory: Territory) -> None:
        self._territory = territory
        self._held: set[int] = set()
        self._cut: tuple[GraphMap, list[Stretch]] | None = None
        self.tables: Sequence[RowTable] = ()
        self.weights: Weights | None = None
        self.check: Callable[[], None] = lambda: None
        self.wait_s = 0.0

    def chunks_of(self, read: WeightRead) -> Iterable[int]:
        """Return the chunks that `read` needs as a whole; looked-up rows need none of their table's inside."""
        chunks = self._territory.chunks_of(read.address, read.length)
        table = self._table_of(read) if read.row_bytes else None
        if table is None:
            return chunks
        return [c for c in chunks if not table.start <= self._territory.place(c).address < table.stop]

    def stretches(self, graph: GraphMap) -> list[Stretch]:
        """Return the stretches of `graph`; those of the graph asked for last are kept."""
        if self._cut is None or self._cut[0] is not graph:
            self._cut = graph, cut_into_stretches(graph, self.chunks_of)
        return self._cut[1]

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Acquire before each stretch, release after it; fetch rows where rows are looked up."""
        for i, node in enumerate(graph):
            if fetch := self._fetch_step(node):
                steps.add_before(i, fetch)
        for stretch in self.stretches(graph):
            steps.add_before(stretch.first, self._acquire_step(stretch.acquire))
            steps.add_after(stretch.last, self._release_step(stretch.release))

    def before_unknown(self, node: Node, address: int) -> bool:
        """Acquire what `node` reads; stop after it when it reads anything."""
        if fetch := self._fetch_step(node):
            fetch(address)
        self._acquire([c for read in node.reads for c in self.chunks_of(read) if c not in self._held])
        return bool(node.reads)

    def after_unknown(self) -> None:
        """Release all that is held."""
        self._release(tuple(self._held))

    def abandon(self) -> None:
        """Release all that is held."""
        self._release(tuple(self._held))

    def _table_of(self, read: WeightRead) -> RowTable | None:
        return next((t for t in self.tables if t.start < read.address + read.length and read.address < t.stop), None)

    def _fetch_step(self, node: Node) -> Step | None:
        read = next((read for read in node.reads if read.row_bytes), None)
        table = self._table_of(read) if read else None
        if read is None or table is None:
            return None

        def fetch(address: int) -> None:
            table.fetch((read.address + row * read.row_bytes, read.row_bytes) for row in looked_up_rows(address))

        return fetch

    def _acquire_step(self, chunks: tuple[int, ...]) -> Step:
        return lambda _: self._acquire(chunks)

    def _release_step(self, chunks: tuple[int, ...]) -> Step:
        return lambda _: self._release(chunks)

    def _acquire(self, chunks: Sequence[int]) -> None:
        assert self.weights is not None, "a pass before the plan was made"
        self.wait_s += self.weights.acquire(chunks, self.check)
        self._held.update(chunks)

    def _release(self, chunks: Sequence[int]) -> None:
        assert self.weights is not None, "a pass before the plan was made"
        self.weights.release(chunks)
        self._held.difference_update(chunks)
