"""Checksums of chunks as they were first read, to tell whether a file was edited while it is in use.

A checksum takes a tenth of a second for a gigabyte, and is taken once. It finds an accidental edit, not a forged one.
A chunk that was never read before has nothing to be compared with.
"""

from __future__ import annotations

import zlib

from edge_run.tiers import _libc

_WORD_BYTES = 8
_ODD = 0x9E3779B97F4A7C15  # Knuth's multiplier: pages that change places change the sum


class ContentSums:
    """The checksums of an `AddressSpace`'s chunks. The caller ensures that only one thread handles a chunk."""

    def __init__(self) -> None:
        self._sums: dict[int, int] = {}

    def is_new(self, chunk: int) -> bool:
        """Return whether `chunk` has no checksum yet."""
        return chunk not in self._sums

    def agrees(self, chunk: int, address: int, length: int) -> bool:
        """Return whether the `length` bytes at `address` are those first read for `chunk`; a new chunk is recorded."""
        found = _sum(address, length)
        return self._sums.setdefault(chunk, found) == found


def _sum(address: int, length: int) -> int:
    import numpy as np

    data = _libc.view(address, length)
    whole = length - length % _libc.PAGE
    words = np.frombuffer(data[:whole], np.uint64).reshape(-1, _libc.PAGE // _WORD_BYTES)
    places = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(_ODD)
    return int((np.add.reduce(words, axis=1) * places).sum()) ^ zlib.crc32(data[whole:])
