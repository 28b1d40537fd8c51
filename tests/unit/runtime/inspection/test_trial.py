"""What a trial leaves out: large multiplications, but for the first of each kind."""

from __future__ import annotations

from edge_run.base.units import KIB, MIB
from edge_run.runtime.graph.nodes import Node, WeightRead
from edge_run.runtime.inspection.trial import MOST_BYTES, MOST_OF_A_KIND_BYTES, plan_trial

F16, Q4_0 = 1, 2


def reader(name: str, length: int, op: str = "MUL_MAT", row_bytes: int = 0) -> Node:
    return Node(b"node", op, (WeightRead(name, 0, length, row_bytes),), True)


def test_what_is_small_is_never_left_out() -> None:
    graph = [Node(b"norm", "RMS_NORM", (), True), *(reader("norm", 4 * KIB, "MUL") for _ in range(100_000))]
    table = reader("table", 1 << 40, "GET_ROWS", row_bytes=8 * KIB)
    assert plan_trial([*graph, table], {}) == frozenset()


def test_of_what_is_large_the_first_of_each_kind_is_computed() -> None:
    size = MOST_BYTES // 2
    graph = [reader("a", size), reader("a", size), reader("a", size), reader("b", size), reader("b", size)]
    assert plan_trial(graph, {"a": F16, "b": Q4_0}) == {2, 4}
    assert plan_trial(graph, {"a": F16, "b": F16}) == {2, 3, 4}
    assert plan_trial([*graph, reader("a", size, "MUL_MAT_ID")], {"a": F16, "b": Q4_0}) == {2, 4}


def test_what_is_too_large_is_left_out_and_a_smaller_one_of_its_kind_computed() -> None:
    graph = [reader("head", MOST_OF_A_KIND_BYTES + 1), reader("gate", 100 * MIB), reader("up", 100 * MIB)]
    assert plan_trial(graph, {"head": Q4_0, "gate": Q4_0, "up": Q4_0}) == {0, 2}
