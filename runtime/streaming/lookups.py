"""Lookups of rows in tables, as steps of passes: the rows that a pass looks up are fetched one by one.

Where the table is also a matrix that streams, its rows are fetched to memory of their own, llama.cpp leaves the node
out, and it is computed from there.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_run.runtime.decoding.driver import Step, Steps
from edge_run.runtime.graph.nodes import GraphMap, Node
from edge_run.runtime.graph.observer import looked_up_rows
from edge_run.runtime.graph.segments import table_of
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.row_products import RowProducts
from edge_run.runtime.streaming.row_slices import leave_out
from edge_run.tiers.rows import RowTable


class Lookups:
    """The lookups of rows in tables.

    ranges: what is read by row.
    wait_s: how long passes waited for rows.
    """

    def __init__(self, tables: Sequence[RowTable], products: RowProducts | None = None) -> None:
        """products: computes lookups in tables that lie apart; None where there are none."""
        self.ranges = [table.range for table in tables]
        self._tables, self._products = tables, products
        self._unknown: Step | None = None
        self._unknown_address = 0
        self.wait_s = 0.0

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Fetch rows where rows are looked up."""
        for i, node in enumerate(graph):
            fetch, look_up = self._steps(node)
            if fetch:
                steps.add_before(i, fetch)
            if look_up:
                steps.add_before(i, leave_out)
                steps.add_after(i, look_up)

    def before_unknown(self, node: Node, address: int) -> bool:
        """Fetch the rows that `node` of an unknown graph looks up; return whether to stop after it."""
        fetch, self._unknown = self._steps(node)
        self._unknown_address = address
        if fetch:
            fetch(address)
        if self._unknown:
            leave_out(address)
        return self._unknown is not None

    def after_unknown(self) -> None:
        """Compute what `before_unknown` had left out."""
        look_up, self._unknown = self._unknown, None
        if look_up:
            look_up(self._unknown_address)

    def close(self) -> None:
        """Free the memory of tables that lie apart, when no reader is at work any more. Idempotent."""
        for table in self._tables:
            table.close()

    def _steps(self, node: Node) -> tuple[Step | None, Step | None]:
        """Return what to do before `node` and, where llama.cpp is to leave it out, instead of it."""
        read = next((read for read in node.reads if read.row_bytes), None)
        number = table_of(read, self.ranges) if read else None
        if read is None or number is None or not node.is_computed:
            return None, None
        table, products = self._tables[number], self._products

        def fetch(address: int) -> None:
            rows = looked_up_rows(address)
            self.wait_s += table.fetch((read.address + row * read.row_bytes, read.row_bytes) for row in rows)

        def look_up(address: int) -> None:
            assert products
            products.look_up(address, table.place_of(read.address))
            ggml.set_compute_flag(address, True)

        return fetch, look_up if table.range.is_apart else None
