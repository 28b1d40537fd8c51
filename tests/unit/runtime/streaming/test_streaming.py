"""Streaming as a feature: the segments of a graph, and what is held while nodes of known and other graphs compute."""

from __future__ import annotations

import contextlib
import ctypes
import errno
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from edge_run.base.errors import TierReadError
from edge_run.base.interrupt import go_on
from edge_run.partition.plan import ResidencyPlan
from edge_run.partition.window import SEGMENT_CHUNKS
from edge_run.runtime.decoding.driver import Steps
from edge_run.runtime.decoding.weight_copies import CopySchedule, WeightCopies
from edge_run.runtime.graph.nodes import Node, WeightRead
from edge_run.runtime.graph.segments import chunks_of
from edge_run.runtime.llama import _ggml
from edge_run.runtime.streaming import assemble
from edge_run.runtime.streaming import lookups as lookups_module
from edge_run.runtime.streaming.assemble import WeightMemory
from edge_run.runtime.streaming.lookups import Lookups
from edge_run.runtime.streaming.weights import StageVisits, WeightStreaming
from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.rows import RowRange
from mapped import PAGE, mapped

CHUNK = PAGE
N_CHUNKS = 40


@dataclass
class Weights:
    """Notes what is held, refuses what a Residency would refuse, and fails at one chunk."""

    held: set[int] = field(default_factory=set)
    asked: list[tuple[int, ...]] = field(default_factory=list)
    exposed: list[frozenset[int] | None] = field(default_factory=list)
    pins: list[tuple[int, ...]] = field(default_factory=list)
    unpins: list[tuple[int, ...]] = field(default_factory=list)
    fails_at: int = -1

    def acquire(self, chunks: Iterable[int]) -> float:
        chunks = tuple(chunks)
        self.asked.append(chunks)
        if self.fails_at in chunks:
            raise TierReadError("the drive is gone")
        assert not self.held & set(chunks), "held already"
        self.held |= set(chunks)
        return 0.5

    def release(self, chunks: Iterable[int]) -> None:
        assert set(chunks) <= self.held, "released what was not held"
        self.held -= set(chunks)

    release_soon = release

    def pin(self, chunks: tuple[int, ...]) -> None:
        self.pins.append(chunks)

    def unpin(self, chunks: tuple[int, ...]) -> None:
        self.unpins.append(chunks)

    def expose(self, but: frozenset[int]) -> None:
        self.exposed.append(but)

    def hide(self) -> None:
        self.exposed.append(None)


@dataclass
class Table:
    """A table of rows in `range`."""

    range: RowRange
    fetched: list[tuple[int, int]] = field(default_factory=list)

    def fetch(self, rows: Iterable[tuple[int, int]]) -> float:
        self.fetched.extend(rows)
        return 0.25


@pytest.fixture
def address_space() -> Iterator[AddressSpace]:
    with mapped([N_CHUNKS * CHUNK], CHUNK) as area:
        yield area


@pytest.fixture
def weights() -> Weights:
    return Weights()


@pytest.fixture
def feature(address_space: AddressSpace, weights: Weights) -> WeightStreaming:
    return WeightStreaming(weights, address_space)  # type: ignore[arg-type]


class Nodes:
    """Makes nodes whose weights lie in the chunks named."""

    def __init__(self, address_space: AddressSpace) -> None:
        self.base = address_space.spans[0].start

    def read(self, chunks: range, row_bytes: int = 0) -> WeightRead:
        return WeightRead("w", self.base + chunks.start * CHUNK, len(chunks) * CHUNK, row_bytes)

    def __call__(self, *chunks: range, op: str = "MUL_MAT") -> Node:
        return Node(b"node", op, tuple(map(self.read, chunks)), True)


@pytest.fixture
def nodes(address_space: AddressSpace) -> Nodes:
    return Nodes(address_space)


def test_a_graph_is_cut_only_before_matrix_multiplications(feature: WeightStreaming, nodes: Nodes) -> None:
    """A cut elsewhere could part nodes that ggml fuses, and sums would differ in the last bit."""
    graph = (
        nodes(range(0, 3)),
        nodes(op="ADD"),
        nodes(range(3, 6), op="MUL"),
        nodes(op="MUL_MAT"),
        nodes(range(6, 9), op="MUL_MAT_ID"),
        nodes(range(9, 10), op="MUL"),
    )
    segments = feature.segments(graph)
    assert [(segment.first, segment.last) for segment in segments] == [(0, 3), (4, 5)]


def test_a_lookup_of_rows_needs_only_the_ends_of_its_table(address_space: AddressSpace, nodes: Nodes) -> None:
    """The inside is fetched row by row; the same table as a matrix is needed as a whole."""
    tables = [RowRange(nodes.base + 11 * CHUNK, nodes.base + 19 * CHUNK, 0, 0, 0)]

    def needed(chunks: range, row_bytes: int = 0) -> list[int]:
        return list(chunks_of(nodes.read(chunks, row_bytes), address_space, tables))

    assert needed(range(10, 20), row_bytes=64) == [10, 19]
    assert needed(range(10, 20)) == list(range(10, 20))
    assert needed(range(30, 33), row_bytes=64) == [30, 31, 32], "of another table"


def test_a_pass_by_program_holds_each_segment_while_it_computes(
    feature: WeightStreaming, weights: Weights, nodes: Nodes
) -> None:
    graph = tuple(nodes(range(i, i + 5)) for i in range(0, 30, 4))
    steps = Steps()
    feature.register(graph, steps)
    for i, node in enumerate(graph):
        for step in steps.before.get(i, ()):
            step(0)
        assert {chunk for read in node.reads for chunk in feature._chunks_of(read)} <= weights.held
        for step in steps.after.get(i, ()):
            step(0)
    assert weights.held == set()
    assert [len(chunks) for chunks in weights.asked] == [5, *[4] * 7], "what neighbours share is kept, not asked again"
    assert feature.wait_s == 0.5 * 8


@pytest.mark.parametrize(("n_always_lent", "ends"), [(5, {1, 3}), (4, {1, 5})])
def test_a_pass_in_visits_stops_where_what_streams_of_a_stage_visit_is_done_with(
    address_space: AddressSpace, weights: Weights, nodes: Nodes, n_always_lent: int, ends: set[int]
) -> None:
    """The rest of a stage visit is computed on what stays, while readers are at the next one."""
    graph = tuple(nodes(range(i, i + 5)) for i in range(0, 30, 5))
    graph = (*graph[:3], replace(graph[3], is_border=True), *graph[4:])
    leaving = {*range(0, 7), *range(15, 18)}
    pinned = tuple(sorted(frozenset(range(7, 25)) - leaving))
    lent = tuple(range(25, 30))
    residency = ResidencyPlan(pinned, (), 0, 0, 0, lent, by_stage_visits=True, n_always_lent=n_always_lent)
    feature = WeightStreaming(weights, address_space, residency=residency)  # type: ignore[arg-type]
    steps = Steps()
    StageVisits(feature).register(graph, steps)
    assert weights.asked == []
    assert set(steps.before) == {0, 3}
    assert set(steps.after) == ends
    for _ in range(2):
        for i, node in enumerate(graph):
            for step in steps.before.get(i, ()):
                step(0)
            needed = {chunk for read in node.reads for chunk in feature._chunks_of(read)}
            assert needed & leaving <= weights.held
            for step in steps.after.get(i, ()):
                step(0)
        assert weights.held == set()
    first, again = weights.asked[:2], weights.asked[2:]
    assert first == [tuple(range(15)), tuple(range(15, 30))]
    assert again == [tuple(range(7)), (15, 16, 17, *range(25, 30))], "what is pinned is waited for once"


def test_a_pass_over_an_unknown_graph_holds_what_each_node_needs(
    feature: WeightStreaming, weights: Weights, nodes: Nodes
) -> None:
    assert feature.before_unknown(nodes(range(0, 3), range(2, 5), op="ADD"), 0), "stop: it reads weights"
    assert weights.held == {0, 1, 2, 3, 4}
    feature.after_unknown()
    assert weights.held == set()
    assert not feature.before_unknown(nodes(op="ADD"), 0)
    assert weights.held == set()


def test_where_a_graph_turns_unknown_what_is_held_is_kept_until_the_next_stop(
    feature: WeightStreaming, weights: Weights, nodes: Nodes
) -> None:
    """The nodes asked about so far are not computed yet."""
    graph = (nodes(range(0, 4)), nodes(op="ADD"), nodes(range(4, 8)))
    steps = Steps()
    feature.register(graph, steps)
    for step in steps.before[0]:
        step(0)
    feature.before_unknown(nodes(range(2, 6)), 0)
    assert weights.held == {0, 1, 2, 3, 4, 5}
    assert weights.asked == [(0, 1, 2, 3), (4, 5)]
    feature.after_unknown()
    assert weights.held == set()


def test_abandoning_lets_go_of_everything(feature: WeightStreaming, weights: Weights, nodes: Nodes) -> None:
    feature.before_unknown(nodes(range(0, 3)), 0)
    weights.fails_at = 7
    with pytest.raises(TierReadError):
        feature.before_unknown(nodes(range(5, 9)), 0)
    feature.abandon()
    assert weights.held == set()


def test_rows_are_fetched_before_the_lookup_in_both_kinds_of_pass(
    address_space: AddressSpace, weights: Weights, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(RowRange(nodes.base, nodes.base + 10 * CHUNK, 0, 0, 0))
    feature = WeightStreaming(weights, address_space, Lookups([table]))  # type: ignore[arg-type, list-item]
    monkeypatch.setattr(lookups_module, "looked_up_rows", lambda address: [3, 5])
    lookup = Node(b"embd", "GET_ROWS", (nodes.read(range(0, 10), row_bytes=64),), True)
    wanted = [(nodes.base + 3 * 64, 64), (nodes.base + 5 * 64, 64)]
    feature.before_unknown(lookup, 0)
    assert table.fetched == wanted
    steps = Steps()
    feature.register((lookup, nodes(range(20, 22))), steps)
    steps.before[0][0](0)
    assert table.fetched == wanted * 2
    assert feature.wait_s >= 0.5  # of the two fetches


def test_what_is_copied_to_a_gpu_is_held_beside_segments_and_by_no_segment(
    feature: WeightStreaming, weights: Weights, nodes: Nodes
) -> None:
    """A chunk may hold a part of what is copied and of what the processor reads: who ends first leaves it there."""
    copied = replace(nodes.read(range(2, 6)), is_copied=True)
    graph = (nodes(range(0, 3)), Node(b"on gpu", "MUL_MAT", (copied,), True, is_on_gpu=True), nodes(range(5, 8)))
    assert {c for segment in feature.segments(graph) for c in segment.needs} == {0, 1, 2, 5, 6, 7}
    feature.before_unknown(graph[0], 0)
    feature.bring([copied])
    assert weights.held == set(range(6))
    assert not feature.before_unknown(graph[1], 0), "no stop where a GPU computes"
    feature.after_unknown()
    assert weights.held == set(range(2, 6))
    feature.before_unknown(graph[2], 0)
    feature.let_go([copied])
    assert weights.held == {5, 6, 7}
    feature.bring([copied])
    feature.abandon()
    assert weights.held == set()


def test_all_but_the_inside_of_tables_can_be_exposed(
    weights: Weights, nodes: Nodes, address_space: AddressSpace
) -> None:
    """A table's rows lie there, whatever the account of chunks says."""
    table = Table(RowRange(nodes.base + 11 * CHUNK, nodes.base + 19 * CHUNK, 0, 0, 0))
    feature = WeightStreaming(weights, address_space, Lookups([table]))  # type: ignore[arg-type, list-item]
    copies = WeightCopies(CopySchedule({}), feature)
    copies.give_up()
    copies.end(is_whole=False)
    assert weights.exposed == [frozenset(range(11, 19)), None]


@dataclass
class Products:
    """Notes the rows that are multiplied by, and what is held then."""

    weights: Weights
    done: list[tuple[range, set[int]]] = field(default_factory=list)

    def multiply(self, address: int, rows: range) -> None:
        self.done.append((rows, set(self.weights.held)))


ROW = 40  # bytes of a row: 102.4 in a page


def large(nodes: Nodes, chunks: range) -> Node:
    """A node that multiplies by a matrix in `chunks`."""
    (read,) = nodes(chunks).reads
    length = read.length // ROW * ROW
    return replace(nodes(chunks), reads=(replace(read, length=length, product_row_bytes=ROW),))


@pytest.mark.parametrize("is_known", [True, False])
def test_a_large_matrix_is_never_held_as_a_whole(
    address_space: AddressSpace, weights: Weights, nodes: Nodes, is_known: bool
) -> None:
    """Its rows come in slices, each of them multiplied by once, while the slice is held and little else."""
    products, struct = Products(weights), _ggml.Tensor()
    feature = WeightStreaming(weights, address_space, products=products)  # type: ignore[arg-type]
    graph, address = (nodes(range(0, 3)), large(nodes, range(5, 30)), nodes(range(30, 32))), ctypes.addressof(struct)
    steps = Steps()
    feature.register(graph, steps)
    for i, node in enumerate(graph):
        struct.flags = _ggml.FLAG_COMPUTE
        if not is_known:
            assert feature.before_unknown(node, address)
        for step in steps.before.get(i, ()) if is_known else ():
            step(address)
        assert bool(struct.flags) is (i != 1), "llama.cpp computes the others"
        if not is_known:
            feature.after_unknown()
        for step in steps.after.get(i, ()) if is_known else ():
            step(address)
        assert struct.flags == _ggml.FLAG_COMPUTE
        assert weights.held == set()
    assert [row for rows, _ in products.done for row in rows] == list(range(25 * CHUNK // ROW))
    for rows, held in products.done:
        first = graph[1].reads[0].address + rows.start * ROW
        assert held == set(address_space.chunks_of(first, len(rows) * ROW))
        assert len(held) <= SEGMENT_CHUNKS
        assert rows.start % 64 == 0


def test_slices_that_stay_are_multiplied_by_together(
    address_space: AddressSpace, weights: Weights, nodes: Nodes
) -> None:
    products, address = Products(weights), ctypes.addressof(struct := _ggml.Tensor())
    feature = WeightStreaming(
        weights,  # type: ignore[arg-type]
        address_space,
        residency=ResidencyPlan(tuple(range(5, 15)), (), 0, 0, 0, lent=tuple(range(15, 30))),
        products=products,  # type: ignore[arg-type]
    )
    steps = Steps()
    feature.register((large(nodes, range(5, 30)),), steps)
    (multiply,) = steps.after[0]
    multiply(address)
    n_slices = len(products.done)
    assert products.done[0][0].stop > 9 * CHUNK // ROW
    assert struct.flags
    feature._n_borrowed = len(feature.lent)
    products.done.clear()
    multiply(address)
    assert [rows for rows, _ in products.done] == [range(25 * CHUNK // ROW)]
    assert n_slices > 3


def test_pinned_chunks_that_are_given_up_are_acquired_in_each_pass_until_they_are_pinned_again(
    address_space: AddressSpace, weights: Weights, nodes: Nodes
) -> None:
    graph = tuple(nodes(range(i, i + 5)) for i in range(0, 30, 5))
    residency = ResidencyPlan(tuple(range(20)), tuple(range(20, 30)), 5, 10, 0, lent=(22, 27), spare=(7, 2, 12))
    feature = WeightStreaming(weights, address_space, residency=residency)  # type: ignore[arg-type]
    steps = Steps()
    feature.register(graph, steps)

    def asked_in_a_pass() -> set[int]:
        weights.asked.clear()
        for i, _ in enumerate(graph):
            for step in (*steps.before.get(i, ()), *steps.after.get(i, ())):
                step(0)
        assert weights.held == set()
        return {chunk for chunks in weights.asked for chunk in chunks}

    assert asked_in_a_pass() == set(range(30)), "the first time all must come"
    assert asked_in_a_pass() == set(range(20, 30))
    feature.borrow(1)
    assert weights.pins == [(22,)]
    feature.borrow(-2)
    assert weights.unpins == [(2, 7, 22)]
    asked_in_a_pass()
    assert asked_in_a_pass() == {2, 7, *range(20, 30)}
    feature.borrow(2)
    assert weights.pins == [(22,), (2, 7, 22, 27)]
    assert asked_in_a_pass() == set(range(30)), "they are waited for once more"
    assert asked_in_a_pass() == set(range(20, 30))


def test_a_table_whose_successor_is_refused_is_closed(
    address_space: AddressSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = [RowRange(at * CHUNK, (at + 4) * CHUNK, 0, 0, CHUNK, is_apart=True) for at in (0, 8, 16)]
    made, closed = list[RowRange](), list[RowRange]()

    class Table:
        """A table that notes its end; there is no memory for a second one."""

        def __init__(self, range: RowRange, *_: object) -> None:
            made.append(range)
            if len(made) == 2:
                raise OSError(errno.ENOMEM, "no memory")
            self.range = range

        def close(self) -> None:
            closed.append(self.range)

    monkeypatch.setattr(assemble, "RowTable", Table)
    memory = WeightMemory(address_space, [None], None, go_on)  # type: ignore[list-item, arg-type]
    with pytest.raises(OSError, match="no memory"), contextlib.ExitStack() as undo:
        memory.lookups(ranges, undo)
    assert (made, closed) == (ranges[:2], ranges[:1])
