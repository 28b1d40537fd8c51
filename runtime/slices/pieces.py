"""Which bytes of a model's files a device reads for its share of the units."""

from __future__ import annotations

from collections.abc import Iterable

from edge_run.runtime.graph.nodes import GraphMap
from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.pieces import Pieces


def pieces_read(graph: GraphMap, address_space: AddressSpace, pieces: Pieces) -> set[int]:
    """Return the pieces that hold the weights that `graph` reads, and one chunk more on either side.

    Weights are read in whole chunks, and the limits of chunks lie elsewhere in the file each time a model is opened.
    """
    found: set[int] = set()
    for read in {read for node in graph for read in node.reads}:
        span = address_space.span_of(read.address)
        start = max(span.start, read.address - address_space.chunk_bytes)
        stop = min(span.stop, read.address + read.length + address_space.chunk_bytes)
        found.update(pieces.covering(span.shard, start - span.base, stop - start))
    return found


def head_pieces(pieces: Pieces, head_bytes: Iterable[int]) -> set[int]:
    """Return the pieces that hold the shards' headers, of `head_bytes` each."""
    return {piece for shard, length in enumerate(head_bytes) for piece in pieces.covering(shard, 0, length)}
