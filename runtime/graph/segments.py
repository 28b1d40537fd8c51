"""Cuts a graph into segments, and finds the chunks of weights that each segment needs.

A segment needs a few MiB of weights, or one large matrix, so that the window is small and reads overlap with computing.
Cuts are made only before matrix multiplications: elsewhere a cut could separate nodes that ggml fuses, and the sums
would differ in the last bit.

A large matrix need not be in memory as a whole: the node that multiplies by it is computed in slices of rows, and each
slice is a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from edge_run.base.units import round_down, round_up
from edge_run.partition.window import SEGMENT_CHUNKS
from edge_run.prefetch.schedule import Segment, schedule_pass
from edge_run.runtime.graph.nodes import MATMULS, GraphMap, Node, WeightRead
from edge_run.tiers._libc import PAGE
from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.rows import RowRange

ROW_GROUP = 64  # ggml's kernels take several rows at a time, so a slice begins at a multiple of that
SLICED_SEGMENTS = 2  # a matrix of more chunks than so many segments is multiplied by in slices


def table_of(read: WeightRead, tables: Sequence[RowRange]) -> int | None:
    """Return the number of the table that `read` looks up rows in, or None."""
    end = read.address + read.length
    pages = round_down(read.address, PAGE), round_up(end, PAGE)

    def is_of(table: RowRange) -> bool:
        if table.is_apart:
            return pages == (table.start, table.stop)
        return table.start < end and read.address < table.stop

    return next((i for i, table in enumerate(tables) if is_of(table)), None)


def chunks_of(read: WeightRead, address_space: AddressSpace, tables: Sequence[RowRange]) -> Sequence[int]:
    """Return the chunks that `read` needs in memory; a lookup of rows needs at most the ends of its table."""
    chunks = address_space.chunks_of(read.address, read.length)
    number = table_of(read, tables) if read.row_bytes else None
    if number is None:
        return chunks
    table = tables[number]
    if table.is_apart:
        return ()
    return [c for c in chunks if not table.start <= address_space.place(c).address < table.stop]


def slices_of(node: Node, address_space: AddressSpace, segment_chunks: int) -> list[tuple[range, WeightRead]]:
    """Return slices of rows of about a chunk each, and what each reads of the matrix that `node` multiplies by.

    There are none where the matrix is no larger than SLICED_SEGMENTS segments of `segment_chunks` chunks, or of usual
    ones where those are longer, or `node` is computed elsewhere.
    """
    if len(node.reads) != 1 or not node.is_computed or node.is_on_gpu or node.is_border:
        return []
    (read,) = node.reads
    row_bytes = read.product_row_bytes
    most_chunks = SLICED_SEGMENTS * max(SEGMENT_CHUNKS, segment_chunks)
    if not row_bytes or read.length <= most_chunks * address_space.chunk_bytes:
        return []
    chunks = address_space.chunks_of(read.address, read.length)
    whole_rows = ((address_space.place(chunk).address - read.address) // row_bytes for chunk in chunks)
    cuts = sorted({round_down(rows, ROW_GROUP) for rows in whole_rows if rows >= ROW_GROUP})
    n_rows = read.length // row_bytes
    parts = [range(first, stop) for first, stop in zip([0, *cuts], [*cuts, n_rows], strict=True)]
    return [
        (rows, replace(read, address=read.address + rows.start * row_bytes, length=len(rows) * row_bytes))
        for rows in parts
    ]


def cut_into_segments(
    graph: GraphMap,
    chunks_of: Callable[[WeightRead], Iterable[int]],
    segment_chunks: int = SEGMENT_CHUNKS,
    sliced: AddressSpace | None = None,
) -> list[Segment]:
    """Return the segments of `graph`, cut at borders and otherwise only before matrix multiplications.

    chunks_of: returns the chunks that a read needs.
    segment_chunks: the most chunks of a segment, where its nodes allow that.
    sliced: where the weights lie, if products with large matrices are cut into slices.
    """
    nothing = frozenset[int]()
    places: list[tuple[int, range | None]] = []  # node and rows of each step: a node, or a slice of one
    needs, may_cut, borders = [], [], set[int]()
    for i, node in enumerate(graph):
        slices = slices_of(node, sliced, segment_chunks) if sliced and node.reads else []
        if node.is_border or slices:
            borders.add(len(places))
        for rows, read in slices:
            places.append((i, rows))
            needs.append(nothing.union(chunks_of(read)))
            may_cut.append(True)
        if slices:
            borders.add(len(places))
            continue
        places.append((i, None))
        needs.append(nothing.union(*map(chunks_of, node.reads)) if node.reads else nothing)
        may_cut.append(node.op in MATMULS and not node.is_on_gpu)
    segments = schedule_pass(needs, may_cut, segment_chunks, borders - {len(places)})
    return [_placed(segment, places) for segment in segments]


def _placed(segment: Segment, places: Sequence[tuple[int, range | None]]) -> Segment:
    """Return `segment`, whose first and last are steps, with the nodes and rows at their `places`."""
    (first, from_rows), (last, to_rows) = places[segment.first], places[segment.last]
    rows = range(from_rows.start, to_rows.stop) if from_rows and to_rows else None
    return replace(segment, first=first, last=last, rows=rows)
