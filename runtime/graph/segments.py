"""Cuts a graph into segments, and finds the chunks of weights that each segment needs.

A segment needs a few MiB of weights, or one large matrix, so that the window is small and reads overlap with computing.
Cuts are made only before matrix multiplications: elsewhere a cut could separate nodes that ggml fuses, and the sums
would differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from edge_run.prefetch.schedule import SEGMENT_CHUNKS, Segment, schedule_pass
from edge_run.runtime.graph.nodes import GraphMap, WeightRead
from edge_run.tiers.address_space import AddressSpace

CUT_BEFORE = frozenset({"MUL_MAT", "MUL_MAT_ID"})


class LookupTable(Protocol):
    """The addresses of a table that is only read by row."""

    @property
    def start(self) -> int:
        """The first address."""
        ...

    @property
    def stop(self) -> int:
        """The address after the last one."""
        ...


def table_of(read: WeightRead, tables: Sequence[LookupTable]) -> int | None:
    """Return the number of the table that overlaps with `read`, or None."""
    end = read.address + read.length
    return next((i for i, table in enumerate(tables) if table.start < end and read.address < table.stop), None)


def chunks_of(read: WeightRead, address_space: AddressSpace, tables: Sequence[LookupTable]) -> Iterable[int]:
    """Return the chunks that `read` needs in memory; a lookup of rows needs only the ends of its table."""
    chunks = address_space.chunks_of(read.address, read.length)
    number = table_of(read, tables) if read.row_bytes else None
    if number is None:
        return chunks
    table = tables[number]
    return [c for c in chunks if not table.start <= address_space.place(c).address < table.stop]


def cut_into_segments(
    graph: GraphMap, chunks_of: Callable[[WeightRead], Iterable[int]], segment_chunks: int = SEGMENT_CHUNKS
) -> list[Segment]:
    """Return the segments of `graph`, cut at borders and otherwise only before matrix multiplications.

    chunks_of: returns the chunks that a read needs.
    segment_chunks: the most chunks of a segment, where its nodes allow that.
    """
    nothing = frozenset[int]()
    needs = [nothing.union(*map(chunks_of, node.reads)) for node in graph]
    borders = [i for i, node in enumerate(graph) if node.is_border]
    return schedule_pass(
        needs, [node.op in CUT_BEFORE and not node.is_on_gpu for node in graph], segment_chunks, borders
    )
