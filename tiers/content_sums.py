"""What each chunk held when it was read first, so that a file in doubt can be compared with itself as it is read again.

Sums are cheap, a tenth of a second for a gigabyte, and taken once: they find an edit, not somebody who works against
them. What was never read before has nothing to be compared with.
"""

from __future__ import annotations

import zlib

from edge_run.tiers import _libc

_WORD_BYTES = 8
_ODD = 0x9E3779B97F4A7C15  # Knuth's multiplier: pages that change places change the sum


class ContentSums:
    """The sums of chunks, numbered as an `AddressSpace` has them. The caller sees to it that one thread has a chunk."""

    def __init__(self) -> None:
        self._sums: dict[int, int] = {}

    def is_new(self, chunk: int) -> bool:
        """Return whether `chunk` has no sum yet."""
        return chunk not in self._sums

    def agrees(self, chunk: int, address: int, length: int) -> bool:
        """Return whether the `length` bytes at `address` are what `chunk` had first; note them where it is new."""
        found = _sum(address, length)
        return self._sums.setdefault(chunk, found) == found


def _sum(address: int, length: int) -> int:
    import numpy as np

    data = _libc.view(address, length)
    whole = length - length % _libc.PAGE
    words = np.frombuffer(data[:whole], np.uint64).reshape(-1, _libc.PAGE // _WORD_BYTES)
    places = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(_ODD)
    return int((np.add.reduce(words, axis=1) * places).sum()) ^ zlib.crc32(data[whole:])
