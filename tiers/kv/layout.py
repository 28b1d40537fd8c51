"""What a context keeps from one pass to the next, as memory: rows by token, and the rest as a whole. Pure.

A token's keys and values are a row of each layer, in the cell that has the number of its position. Blocks of rows are
saved once and never change. What is not by token (a sliding window's ring, recurrent state) is saved as it is at one
position: a snapshot, in which the rows after the last complete block lie too. Of a ring those cells are in it that
tokens can have been given: as many as there were tokens, since each took the first free one, until all have had one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edge_run.base.units import MIB
from edge_run.tiers.kv.cells import CellTensor

BLOCK_ROWS = 256
MOST_PART_BYTES = MIB  # that are copied, read or written at once


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """`n_strips` strips of `strip_bytes` bytes, the first one at `address`, `stride_bytes` from one to the next."""

    address: int
    strip_bytes: int
    n_strips: int = 1
    stride_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """The bytes of all strips."""
        return self.n_strips * self.strip_bytes


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The memory of one context.

    rows: the keys and values by token. others: what is kept as a whole, (address, bytes). rings: the keys and values of
    sliding windows.
    """

    rows: Sequence[CellTensor]
    others: Sequence[tuple[int, int]] = ()
    rings: Sequence[CellTensor] = ()

    @property
    def needs_snapshots(self) -> bool:
        """Whether rows alone do not bring a context back."""
        return bool(self.others or self.rings)

    @property
    def signature(self) -> str:
        """What two contexts share whose files are alike."""
        rows = ",".join(f"{tensor.n_rows}x{tensor.cell_bytes}" for tensor in self.rows)
        rings = "".join(f";{ring.n_cells}x{ring.n_rows}x{ring.cell_bytes}" for ring in self.rings)
        return f"{rows};{','.join(str(length) for _, length in self.others)}{rings}"

    def row_bytes(self, n_rows: int) -> int:
        """Return what `n_rows` rows take in a file."""
        return sum(tensor.n_rows * tensor.cell_bytes for tensor in self.rows) * n_rows

    def snapshot_bytes(self, start: int, stop: int) -> int:
        """Return what a snapshot at the position `stop` takes in a file, with the rows from `start` on."""
        rings_bytes = sum(ring.n_rows * ring.cell_bytes * _taken(ring, stop) for ring in self.rings)
        return self.row_bytes(stop - start) + rings_bytes + sum(length for _, length in self.others)

    def row_parts(self, start: int, stop: int) -> Iterator[MemoryPart]:
        """Yield the memory of the rows `start` to `stop`, in the order of files, in parts of a limited size."""
        for tensor in self.rows:
            yield from _cell_parts(tensor, start, stop)

    def snapshot_parts(self, start: int, stop: int) -> Iterator[MemoryPart]:
        """Yield the memory of a snapshot at the position `stop`, with the rows from `start` on."""
        yield from self.row_parts(start, stop)
        for ring in self.rings:
            yield from _cell_parts(ring, 0, _taken(ring, stop))
        for address, length in self.others:
            yield from _parts(address, length)


def _taken(ring: CellTensor, n_tokens: int) -> int:
    """Return how many cells, the first ones, `n_tokens` tokens can have been given; of few cells all."""
    return ring.n_cells if ring.n_cells <= BLOCK_ROWS else min(n_tokens, ring.n_cells)


def _cell_parts(tensor: CellTensor, start: int, stop: int) -> Iterator[MemoryPart]:
    size_bytes = (stop - start) * tensor.cell_bytes
    address = tensor.address + start * tensor.cell_bytes
    if tensor.n_rows == 1:
        yield from _parts(address, size_bytes)
        return
    most = max(1, MOST_PART_BYTES // max(1, size_bytes))
    for first in range(0, tensor.n_rows, most):
        n_strips = min(most, tensor.n_rows - first)
        yield MemoryPart(address + first * tensor.row_bytes, size_bytes, n_strips, tensor.row_bytes)


def _parts(address: int, length: int) -> Iterator[MemoryPart]:
    for done in range(0, length, MOST_PART_BYTES):
        yield MemoryPart(address + done, min(MOST_PART_BYTES, length - done))
