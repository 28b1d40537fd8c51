"""Which keys and values each node of a pass reads and writes."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace

from edge_run.runtime.graph.flow import Flow
from edge_run.runtime.graph.nodes import WRITES_ROWS, GraphMap


def cell_uses(graph: GraphMap, flow: Flow) -> tuple[tuple[int, ...], ...]:
    """Return, for each node that reads keys or values, which of `flow.cells` it reads, by number, in order.

    Only those count that lie as rows, and that nothing writes but row by row.
    """
    numbers = {tensor.address: number for number, tensor in enumerate(flow.cells) if tensor.n_rows == 1}
    found: dict[int, int] = {}  # of the storages of rows
    for storage, one in enumerate(flow.storages):
        if one.producer is None and one.address in numbers:
            found[storage] = numbers[one.address]
    for node, written in zip(graph, flow.writes, strict=True):
        if written in found and node.op != WRITES_ROWS:
            del found[written]
    reads = (
        tuple(sorted(found[storage] for storage in read if storage in found))
        for node, read in zip(graph, flow.reads, strict=True)
        if node.op != WRITES_ROWS
    )
    return tuple(use for use in reads if use)


def with_cells(graph: GraphMap, flow: Flow, addresses: AbstractSet[int]) -> GraphMap:
    """Return `graph`, whose flow is `flow`, as an observer maps it that is asked about the cells at `addresses`."""
    asked = {number: leaf.address for number, leaf in enumerate(flow.storages) if leaf.address in addresses}

    def touched(read: tuple[int, ...], written: int | None) -> tuple[int, ...]:
        storages = read if written is None else (*read, written)
        return tuple(sorted({asked[storage] for storage in storages if storage in asked}))

    parts = zip(graph, flow.reads, flow.writes, strict=True)
    return tuple(replace(node, cells=touched(read, written)) for node, read, written in parts)
