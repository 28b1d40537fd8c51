"""What of a context's rows can be away in a file, what stays in memory then, and what a pass reads. Pure.

The rows of every layer, of each stream for itself, are cut into pieces of one size. A piece can be away once all of
its rows are there; an attention has the pieces of its own layer in memory, and those of the attentions after it are
read meanwhile. What can be away is said a little too low, as it is not asked where in a page a tensor begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_run.base.units import MIB
from edge_run.tiers.kv.cells import Cells
from edge_run.tiers.kv.layout import BLOCK_ROWS

MOST_PIECE_BYTES = MIB
_PIECES_OF_STREAM = 16  # at least, of a tensor, where there are several streams
_MOST_PIECES = 8192  # of all streams, as far as blocks are large enough for that
_LOST_PAGES = 3  # of a tensor, that are shared with what lies before and after it


def piece_bytes(cells: Cells, most_bytes: int) -> int:
    """Return the size of a piece: about a block of rows of the widest tensor, a power of two.

    Where there are several streams, each may have a piece of each tensor that is not complete: smaller ones then, as
    long as they are not too many, as each is also an entry in tables of ours.
    """
    widest = max((tensor.cell_bytes for tensor in cells.tensors if tensor.n_rows == 1), default=1)
    least_bytes = BLOCK_ROWS * widest
    if cells.n_streams > 1:
        longest = max((tensor.n_cells for tensor in cells.tensors), default=1) // cells.n_streams
        all_bytes = sum(tensor.row_bytes for tensor in cells.tensors if tensor.n_rows == 1)
        least_bytes = min(least_bytes, max(longest // _PIECES_OF_STREAM * widest, all_bytes // _MOST_PIECES, 1))
    size = 1 << (least_bytes - 1).bit_length()
    return max(cells.page_bytes, min(size, most_bytes, MOST_PIECE_BYTES))


@dataclass(frozen=True, slots=True)
class SpillShape:
    """The rows of one context.

    cells: all that it keeps by cell. uses: for each attention of a pass, in order, which of the tensors it reads that
    may be away. piece_bytes: the size of a piece. width: tokens in a pass, at most. attentions: how many have their
    pieces in memory at once.

    Rows are counted of all streams together, however they lie in these.
    """

    cells: Cells
    uses: Sequence[Sequence[int]]
    piece_bytes: int
    width: int
    attentions: int

    def complete(self, n_rows: int) -> list[int]:
        """Return how many pieces of each tensor `n_rows` rows complete, at least; 0 for those that stay in memory."""
        counts, n_streams = [0] * len(self.cells.tensors), self.cells.n_streams
        lost_bytes = n_streams * _LOST_PAGES * self.cells.page_bytes + (n_streams - 1) * (self.piece_bytes - 1)
        for number in {number for use in self.uses for number in use}:
            size = n_rows * self.cells.tensors[number].cell_bytes - lost_bytes
            counts[number] = max(0, size // self.piece_bytes)
        return counts

    def at_once(self, counts: Sequence[int]) -> int:
        """Return how many pieces of those that are away are in memory at once. counts: for each tensor."""
        n_uses = len(self.uses)
        width = min(self.attentions, n_uses)
        windows = (_joined(self.uses[(i + k) % n_uses] for k in range(width)) for i in range(n_uses))
        return max((sum(counts[number] for number in window) for window in windows), default=0)

    def read_bytes(self, counts: Sequence[int]) -> int:
        """Return what a pass reads of them."""
        return self.piece_bytes * sum(counts[number] for use in self.uses for number in use)

    def held_bytes(self, n_rows: int, n_away: int) -> int:
        """Return what `n_rows` rows take in memory while the pieces that the first `n_away` complete are away."""
        counts = self.complete(n_away)
        return self.cells.bytes_for(n_rows) - self.piece_bytes * (sum(counts) - self.at_once(counts))

    def least_bytes(self, n_tokens: int) -> int:
        """Return what a context of `n_tokens` tokens takes at least, in the pass that fills it."""
        return min(self.cells.bytes_for(n_tokens), self.held_bytes(n_tokens, max(0, n_tokens - self.width)))

    def tokens_in(self, room_bytes: int, most_tokens: int) -> int:
        """Return how many tokens, at most `most_tokens`, a context may have in `room_bytes` of memory."""
        return bisect_left(range(1, most_tokens + 1), True, key=lambda tokens: self.least_bytes(tokens) > room_bytes)

    def read_at(self, n_tokens: int, room_bytes: int) -> int:
        """Return what a token reads when the context has `n_tokens` tokens, and `room_bytes` of memory."""
        if self.cells.bytes_for(n_tokens + 1) <= room_bytes:
            return 0
        n_away = bisect_left(range(n_tokens), True, key=lambda n: self.held_bytes(n_tokens + 1, n) <= room_bytes)
        return self.read_bytes(self.complete(n_away))


def _joined(uses: Iterable[Sequence[int]]) -> set[int]:
    return {number for use in uses for number in use}
