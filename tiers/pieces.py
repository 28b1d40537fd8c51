"""A model's bytes as numbered pieces, each with a digest; the hash of a model is the hash of all digests.

A device that knows a model's hash can check the list of digests, and with the list each piece that another device
sends, without the rest of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

PIECE_BYTES = 256 << 10
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class PiecePlace:
    """Where a piece lies: `length` bytes at `offset` in shard number `shard`."""

    shard: int
    offset: int
    length: int


class Pieces:
    """The pieces of a model whose shards have `sizes` bytes, numbered from the first shard on.

    Each shard begins a new piece.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._first = [0]
        for size in self.sizes:
            self._first.append(self._first[-1] - (-size // PIECE_BYTES))

    @property
    def count(self) -> int:
        """How many pieces there are."""
        return self._first[-1]

    def place(self, piece: int) -> PiecePlace:
        """Return where `piece` lies."""
        shard = bisect_right(self._first, piece) - 1
        offset = (piece - self._first[shard]) * PIECE_BYTES
        return PiecePlace(shard, offset, min(PIECE_BYTES, self.sizes[shard] - offset))

    def covering(self, shard: int, offset: int, length: int) -> range:
        """Return the pieces that hold `length` bytes at `offset` of a shard, up to the shard's end."""
        stop = min(offset + length, self.sizes[shard])
        if offset >= stop:
            return range(0)
        first = self._first[shard]
        return range(first + offset // PIECE_BYTES, first - (-stop // PIECE_BYTES))

    def total_bytes(self, pieces: Sequence[int] | set[int]) -> int:
        """Return the total size of `pieces`."""
        return sum(self.place(piece).length for piece in pieces)


def read_at(descriptor: int, length: int, offset: int) -> bytes:
    """Return the bytes there, fewer at the file's end only; some file systems give fewer at a time than they have."""
    content = b""
    while len(content) < length and (piece := os.pread(descriptor, length - len(content), offset + len(content))):
        content += piece
    return content


def piece_digest(data: bytes | memoryview) -> bytes:
    """Return the digest of the piece whose bytes are `data`."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=b"edge-run piece").digest()


def model_hash(sizes: Sequence[int], digests: bytes) -> str:
    """Return the hash of a model.

    sizes: the bytes of each shard.
    digests: the digests of all pieces, joined.
    """
    state = hashlib.blake2b(json.dumps(list(sizes)).encode(), digest_size=32, person=b"edge-run model")
    state.update(digests)
    return state.hexdigest()
