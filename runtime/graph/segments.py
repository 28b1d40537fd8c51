"""The segments of a graph: which chunks of weights it needs where, and where it may be cut.

The graph is cut into segments of a few MiB of weights (a large matrix is a segment of its own), so that the window is
small and reads overlap with computing. A segment is only cut before a matrix multiplication: elsewhere a cut could
separate nodes that ggml fuses, and the sums would differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from edge_run.prefetch.schedule import SEGMENT_CHUNKS, Segment, schedule_pass
from edge_run.runtime.graph.nodes import GraphMap, WeightRead
from edge_run.tiers.address_space import AddressSpace

CUT_BEFORE = frozenset({"MUL_MAT", "MUL_MAT_ID"})


class LookupTable(Protocol):
    """Addresses [start, stop) of a table that is only ever read by row."""

    @property
    def start(self) -> int:
        """The first address."""
        ...

    @property
    def stop(self) -> int:
        """The address after the last one."""
        ...


def table_of(read: WeightRead, tables: Sequence[LookupTable]) -> int | None:
    """Return which of `tables` holds a part of what `read` reads; None for none."""
    end = read.address + read.length
    return next((i for i, table in enumerate(tables) if table.start < end and read.address < table.stop), None)


def chunks_of(read: WeightRead, address_space: AddressSpace, tables: Sequence[LookupTable]) -> Iterable[int]:
    """Return the chunks that `read` needs as a whole; looked-up rows need none of their table's inside."""
    chunks = address_space.chunks_of(read.address, read.length)
    number = table_of(read, tables) if read.row_bytes else None
    if number is None:
        return chunks
    table = tables[number]
    return [c for c in chunks if not table.start <= address_space.place(c).address < table.stop]


def cut_into_segments(
    graph: GraphMap, chunks_of: Callable[[WeightRead], Iterable[int]], segment_chunks: int = SEGMENT_CHUNKS
) -> list[Segment]:
    """Return the segments of `graph`, cut only before matrix multiplications, and at borders."""
    nothing = frozenset[int]()
    needs = [nothing.union(*map(chunks_of, node.reads)) for node in graph]
    borders = [i for i, node in enumerate(graph) if node.is_border]
    return schedule_pass(
        needs, [node.op in CUT_BEFORE and not node.is_on_gpu for node in graph], segment_chunks, borders
    )
