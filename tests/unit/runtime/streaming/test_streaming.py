"""Streaming as a feature: the segments of a graph, and what is held while nodes of known and other graphs compute."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from edge_run.base.errors import TierReadError
from edge_run.base.interrupt import go_on
from edge_run.partition.plan import ResidencyPlan
from edge_run.runtime.decoding.driver import Steps
from edge_run.runtime.decoding.weight_copies import CopySchedule, WeightCopies
from edge_run.runtime.graph.nodes import Node
from edge_run.runtime.graph.segments import chunks_of
from edge_run.runtime.streaming import assemble
from edge_run.runtime.streaming import lookups as lookups_module
from edge_run.runtime.streaming.assemble import WeightMemory
from edge_run.runtime.streaming.lookups import Lookups
from edge_run.runtime.streaming.weights import PinnedWeights, StageVisits, WeightStreaming
from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.rows import RowRange
from held_weights import CHUNK, Nodes, Weights


@dataclass
class Table:
    """A table of rows in `range`."""

    range: RowRange
    fetched: list[tuple[int, int]] = field(default_factory=list)

    def fetch(self, rows: Iterable[tuple[int, int]]) -> float:
        self.fetched.extend(rows)
        return 0.25


@pytest.fixture
def feature(address_space: AddressSpace, weights: Weights) -> WeightStreaming:
    return WeightStreaming(weights, address_space)  # type: ignore[arg-type]


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


def test_a_graph_that_was_cut_already_is_not_cut_again(
    address_space: AddressSpace, weights: Weights, nodes: Nodes, feature: WeightStreaming
) -> None:
    graph, other = (nodes(range(0, 3)),), (nodes(range(3, 6)),)
    known = feature.segments(graph)
    again = WeightStreaming(weights, address_space, cut=(graph, known))  # type: ignore[arg-type]
    assert again.segments(graph) is known
    assert again.segments(other) == feature.segments(other)


def test_weights_that_stay_are_waited_for_until_they_are_there_and_no_more(
    address_space: AddressSpace, weights: Weights, nodes: Nodes
) -> None:
    graph, steps = (nodes(range(0, 3)),), Steps()
    stays = PinnedWeights(weights, address_space, Lookups(()))  # type: ignore[arg-type]
    stays.register(graph, steps)
    (step,) = steps.before[0]
    weights.fails_at = 1
    with pytest.raises(TierReadError):
        step(0)
    weights.fails_at = -1
    for _ in range(3):
        step(0)
    assert weights.held == {0, 1, 2}
    assert weights.asked == [(0, 1, 2)] * 2, "a failed wait is one more"
    stays._held.clear()
    step(0)
    assert len(weights.asked) == 2, "its chunks are not looked through again"


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

    class NotedTable:
        """A table that notes its end; there is no memory for a second one."""

        def __init__(self, range: RowRange, *_: object) -> None:
            made.append(range)
            if len(made) == 2:
                raise OSError(errno.ENOMEM, "no memory")
            self.range = range

        def close(self) -> None:
            closed.append(self.range)

    monkeypatch.setattr(assemble, "RowTable", NotedTable)
    memory = WeightMemory(address_space, [None], None, go_on)  # type: ignore[list-item, arg-type]
    with pytest.raises(OSError, match="no memory"), contextlib.ExitStack() as undo:
        memory.lookups(ranges, undo)
    assert (made, closed) == (ranges[:2], ranges[:1])
