"""Reads from llama.cpp's graph which memory its nodes write and read, also through views, by structure, not by name."""

from __future__ import annotations

from typing import Any

from edge_run.runtime.graph.flow import Flow, Storage
from edge_run.runtime.graph.nodes import COMPUTES_NOTHING, WRITES_ROWS
from edge_run.runtime.llama import _ggml as ggml
from edge_run.tiers.kv.cells import CellTensor


class FlowObserver:
    """Observes the nodes of one graph, in order, before any of them is computed. Not thread-safe."""

    def __init__(self) -> None:
        self._storages: list[Storage] = []
        self._numbers: dict[int, int | None] = {}
        self._writes: list[int | None] = []
        self._reads: list[tuple[int, ...]] = []
        self._cells: dict[int, CellTensor] = {}

    def observe(self, address: int) -> None:
        """Record what the node at `address` (a tensor struct) writes and reads."""
        tensor = ggml.tensor_at(address)
        op, root = ggml.op_name(tensor.op), tensor.view_src
        if op in COMPUTES_NOTHING:  # what looks through it is noted where it is read
            self._writes.append(None)
            self._reads.append(())
            if not root:
                self._numbers[address] = self._new(address, None)
            return
        if not root:
            self._numbers[address] = self._new(address, len(self._writes))
        written = self._number(root or address)
        if op == WRITES_ROWS and root and ggml.is_on_host(root):
            self._cells[root] = _cells(ggml.tensor_at(root), is_column=tensor.ne[0] == 1)
        others = (source for source in tensor.src[:] if source and source != address)  # a cast names itself
        reads = {self._number(ggml.tensor_at(source).view_src or source) for source in others}
        self._writes.append(written)
        self._reads.append(tuple(sorted(number for number in reads if number is not None)))

    def take(self) -> Flow:
        """Return the flow of the nodes observed."""
        return Flow(tuple(self._storages), tuple(self._writes), tuple(self._reads), tuple(self._cells.values()))

    def _new(self, address: int, producer: int | None) -> int:
        data = ggml.tensor_at(address).data or 0
        self._storages.append(Storage(producer, ggml.functions().ggml_nbytes(address), data))
        return len(self._storages) - 1

    def _number(self, root: int) -> int | None:
        """Return the number of the storage of `root`; None for weights."""
        if root not in self._numbers:
            self._numbers[root] = None if ggml.is_weight(root) else self._new(root, None)
        return self._numbers[root]


def _cells(leaf: Any, *, is_column: bool) -> CellTensor:
    """Return the cells of a cache's leaf, `(width, n_cells)`, that is written by row, or as columns one by one."""
    width, n_cells = leaf.ne[0], leaf.ne[1] * leaf.ne[2]
    if is_column:
        return CellTensor(leaf.data, n_cells, leaf.nb[0], width)
    return CellTensor(leaf.data, n_cells, leaf.nb[1])
