"""A model's bytes as numbered pieces, each with its digest; the hash of a model is that of all the digests.

So whoever knows a model's hash can check the list of digests, and with that each piece for itself, as it comes from
somewhere else: no piece needs the rest of the file to be trusted.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

PIECE_BYTES = 256 << 10
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class PiecePlace:
    """Where a piece lies: `length` bytes at `offset` of shard number `shard`."""

    shard: int
    offset: int
    length: int


class Pieces:
    """The pieces of a model whose shards have `sizes` bytes, numbered through; each shard begins a new one."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._first = [0]
        for size in self.sizes:
            self._first.append(self._first[-1] - (-size // PIECE_BYTES))

    @property
    def count(self) -> int:
        """How many there are."""
        return self._first[-1]

    def place(self, piece: int) -> PiecePlace:
        """Return where `piece`, which is one of these, lies."""
        shard = bisect_right(self._first, piece) - 1
        offset = (piece - self._first[shard]) * PIECE_BYTES
        return PiecePlace(shard, offset, min(PIECE_BYTES, self.sizes[shard] - offset))

    def covering(self, shard: int, offset: int, length: int) -> range:
        """Return the pieces that hold `length` bytes at `offset` of a shard, as far as it has them."""
        stop = min(offset + length, self.sizes[shard])
        if offset >= stop:
            return range(0)
        first = self._first[shard]
        return range(first + offset // PIECE_BYTES, first - (-stop // PIECE_BYTES))

    def total_bytes(self, pieces: Sequence[int] | set[int]) -> int:
        """Return the bytes of `pieces` together."""
        return sum(self.place(piece).length for piece in pieces)


def piece_digest(data: bytes | memoryview) -> bytes:
    """Return the digest of a piece."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=b"edge-run piece").digest()


def model_hash(sizes: Sequence[int], digests: bytes) -> str:
    """Return the hash of a model whose shards have `sizes` bytes, and whose pieces have `digests`, end to end."""
    state = hashlib.blake2b(json.dumps(list(sizes)).encode(), digest_size=32, person=b"edge-run model")
    state.update(digests)
    return state.hexdigest()
