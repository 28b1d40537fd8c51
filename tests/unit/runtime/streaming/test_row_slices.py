"""Large matrices: their rows come in slices, and each of these is multiplied by once."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace

import pytest

from edge_run.partition.plan import ResidencyPlan
from edge_run.partition.window import SEGMENT_CHUNKS
from edge_run.runtime.decoding.driver import Steps
from edge_run.runtime.graph.nodes import Node
from edge_run.runtime.llama import _ggml
from edge_run.runtime.streaming.weights import WeightStreaming
from edge_run.tiers.address_space import AddressSpace
from held_weights import CHUNK, Nodes, Weights


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
