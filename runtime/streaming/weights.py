"""Streaming as a feature of a pass: each stretch of the graph waits for its weights, and gives them back at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from edge_run.prefetch.schedule import Stretch, join_turns
from edge_run.runtime.decoding.driver import Step, Steps
from edge_run.runtime.decoding.weight_copies import WeightCopies
from edge_run.runtime.graph.nodes import GraphMap, Node, WeightRead
from edge_run.runtime.graph.observer import looked_up_rows
from edge_run.runtime.graph.segments import chunks_of, cut_into_stretches, table_of
from edge_run.tiers.rows import RowTable
from edge_run.tiers.territory import Territory
from edge_run.tiers.weights import Weights


class WeightStreaming:
    """The feature. `tables` and `weights` are set once they are planned; the chunks inside a table are never streamed.

    check runs while a pass waits for weights and may raise to stop it. wait_s counts those waits. pinned: chunks that
    stay; guests: those that do while there is memory lent for them. may_take_turns: passes in which they do may hold
    all that a turn needs from its start on; takes_turns: those of the graph that is registered next do.
    """

    def __init__(self, territory: Territory) -> None:
        self._territory = territory
        self._held: Counter[int] = Counter()  # how often: a stretch may need what is copied to a GPU
        self._being_copied: Counter[int] = Counter()
        self._cut: tuple[GraphMap, list[Stretch]] | None = None
        self.tables: Sequence[RowTable] = ()
        self.weights: Weights | None = None
        self.guests: Sequence[int] = ()
        self.pinned: frozenset[int] = frozenset()
        self.may_take_turns = self.takes_turns = False
        self.check: Callable[[], None] = lambda: None
        self.wait_s = 0.0

    def stretches(self, graph: GraphMap) -> list[Stretch]:
        """Return the stretches of `graph`; those of the graph asked for last are kept."""
        if self._cut is None or self._cut[0] is not graph:
            self._cut = graph, cut_into_stretches(graph, self._chunks_of)
        return self._cut[1]

    def turns(self, graph: GraphMap) -> list[Stretch]:
        """Return the stretches of `graph` joined between its borders."""
        return join_turns(self.stretches(graph), [i for i, node in enumerate(graph) if node.is_border])

    def stretches_of_plan(self, graph: GraphMap) -> list[Stretch]:
        """Return the stretches of `graph`, and with them what is copied to a GPU."""
        return cut_into_stretches(graph, self._copied_chunks)

    def follow(self, copies: WeightCopies) -> None:
        """Bring what is copied to a GPU, too."""
        assert self.weights is not None, "copies before the plan was made"
        inside = [chunk for table in self.tables for chunk in self._chunks_inside(table)]
        copies.bring, copies.let_go = self._bring, self._let_go
        copies.expose = partial(self.weights.expose, frozenset(inside))
        copies.hide = self.weights.hide

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Acquire before each stretch, release after it; fetch rows where rows are looked up."""
        self._register_fetches(graph, steps)
        stretches = self.stretches(graph)
        for stretch in self.turns(graph) if self.takes_turns else stretches:
            steps.add_before(stretch.first, self._acquire_step(stretch.acquire))
            steps.add_after(self._last_need(stretch, stretches), self._release_step(stretch.release))

    def _last_need(self, turn: Stretch, stretches: Sequence[Stretch]) -> int:
        """Return the last node of the last of `stretches` within `turn` that needs something that does not stay."""
        if not self.takes_turns:
            return turn.last
        staying = self.pinned.union(self.guests)
        parts = (one for one in stretches if turn.first <= one.first and not staying.issuperset(one.needs))
        return max((part.last for part in parts if part.last <= turn.last), default=turn.last)

    def before_unknown(self, node: Node, address: int) -> bool:
        """Acquire what `node` reads; stop after it when it reads anything that is not copied."""
        if fetch := self._fetch_step(node):
            fetch(address)
        self._acquire(list(dict.fromkeys(chunk for read in node.reads for chunk in self._chunks_of(read))))
        return any(not read.is_copied for read in node.reads)

    def after_unknown(self) -> None:
        """Release all that is held, but what is copied."""
        self._release(tuple((self._held - self._being_copied).elements()))

    def abandon(self) -> None:
        """Release all that is held."""
        self._being_copied.clear()
        self._release(tuple(self._held.elements()))

    def _chunks_of(self, read: WeightRead) -> Iterable[int]:
        return () if read.is_copied else self._copied_chunks(read)

    def _copied_chunks(self, read: WeightRead) -> Iterable[int]:
        return chunks_of(read, self._territory, self.tables)

    def _chunks_copied(self, reads: Sequence[WeightRead]) -> list[int]:
        return sorted({chunk for read in reads for chunk in self._copied_chunks(read)})

    def _bring(self, reads: Sequence[WeightRead]) -> None:
        chunks = self._chunks_copied(reads)
        self._acquire(chunks)
        self._being_copied.update(chunks)

    def _let_go(self, reads: Sequence[WeightRead]) -> None:
        self._being_copied.clear()
        self._release(self._chunks_copied(reads))

    def _chunks_inside(self, table: RowTable) -> Iterable[int]:
        return self._territory.chunks_of(table.start, table.stop - table.start)

    def _register_fetches(self, graph: GraphMap, steps: Steps) -> None:
        for i, node in enumerate(graph):
            if fetch := self._fetch_step(node):
                steps.add_before(i, fetch)

    def _fetch_step(self, node: Node) -> Step | None:
        read = next((read for read in node.reads if read.row_bytes), None)
        number = table_of(read, self.tables) if read else None
        if read is None or number is None:
            return None
        table = self.tables[number]

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
                self._release(tuple(self.pinned.intersection(chunks)))
                may_lack = False  # what is pinned is there from now on

        return acquire

    def _release_step(self, chunks: tuple[int, ...]) -> Step:
        leaving, is_turn = self._leaving(chunks), self.takes_turns
        return lambda _: self._release(leaving, is_turn)

    def _leaving(self, chunks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(chunk for chunk in chunks if chunk not in self.pinned)

    def _acquire(self, chunks: Sequence[int]) -> None:
        assert self.weights is not None, "a pass before the plan was made"
        self.wait_s += self.weights.acquire([chunk for chunk in chunks if chunk not in self._held], self.check)
        self._held.update(dict.fromkeys(chunks, 1))

    def _release(self, chunks: Sequence[int], is_turn: bool = False) -> None:
        """Let `chunks` go; at the end of a turn, when frames have time, others do what follows."""
        assert self.weights is not None, "a pass before the plan was made"
        self._held.subtract(chunks)
        gone = [chunk for chunk in dict.fromkeys(chunks) if self._held[chunk] <= 0]
        for chunk in gone:
            del self._held[chunk]
        (self.weights.release_soon if is_turn else self.weights.release)(gone)


class PinnedWeights(WeightStreaming):
    """The feature for weights that stay once they are there: no pass stops for them.

    elsewhere: addresses of weights that are not its business.
    """

    def __init__(self, territory: Territory, elsewhere: Collection[int] = ()) -> None:
        super().__init__(territory)
        self._elsewhere = elsewhere

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Wait for each stretch, which is for the first time only; fetch rows where rows are looked up."""
        self._register_fetches(graph, steps)
        for stretch in self.stretches(graph):
            steps.add_before(stretch.first, self._acquire_step(stretch.acquire))

    def before_unknown(self, node: Node, address: int) -> bool:
        """Bring what `node` reads."""
        super().before_unknown(node, address)
        return False

    def _chunks_of(self, read: WeightRead) -> Iterable[int]:
        return () if read.address in self._elsewhere else super()._chunks_of(read)

    def _acquire(self, chunks: Sequence[int]) -> None:
        super()._acquire([chunk for chunk in chunks if chunk not in self._held])

    def _release(self, chunks: Sequence[int], is_turn: bool = False) -> None:
        """They stay."""
