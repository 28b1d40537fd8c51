"""Checksums of chunks as they were first read, to tell whether a file was edited while it is in use.

Checksums take some 0.15 seconds for a gigabyte, and are taken once. They find accidental edits, not forged ones.
A chunk that was never read before has nothing to be compared with.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Iterable, Sequence

from edge_run.base.files.identity import changed
from edge_run.tiers import _libc
from edge_run.tiers.source import Source

WORD_BYTES = 8
_ODD = 0x9E3779B97F4A7C15  # Knuth's multiplier


class ContentSums:
    """The checksums of chunks, or of a table's pages, 4 bytes each. Each is handled by one thread at a time."""

    def __init__(self, n_chunks: int) -> None:
        self._sums = array("I", bytes(4 * n_chunks))  # 0: none yet

    def has_all(self, chunks: Iterable[int]) -> bool:
        """Return whether all of `chunks` have a checksum."""
        return all(map(self._sums.__getitem__, chunks))

    def compare(self, source: Source, chunks: Sequence[int], address: int, offset: int, lengths: Iterable[int]) -> None:
        """Compare `chunks`, which were just read, with what was first read for them, if their file may have changed.

        chunks: which lie one after the other from `address` on in memory, and from `offset` on in the file, with
            `lengths` bytes each, but for what is beyond the end of the file. Those that are new are recorded.

        Raises ModelFileError where one has changed.
        """
        if source.is_doubtful or not self.has_all(chunks):
            inside = list[int]()
            for length in lengths:
                inside.append(min(length, source.size_bytes - offset))
                offset += length
            is_same = self.agree(chunks, address, inside)
            if source.is_doubtful and not is_same:  # else whoever writes the file may have written other content
                raise changed(source.path)

    def agree(self, chunks: Sequence[int], address: int, lengths: Sequence[int]) -> bool:
        """Record those of `chunks` that are new; return whether the others are what was first read for them.

        chunks: which lie one after the other from `address` on, with `lengths` bytes each.
        """
        found, start = list[int](), address
        for length, same in itertools.groupby(lengths):
            count = len(list(same))
            found += _sums(start, length, count) if length % _libc.PAGE == 0 else [_ragged_sum(start, length)]
            start += length * count
        agreeing = [self._agrees(chunk, _folded(content)) for chunk, content in zip(chunks, found, strict=True)]
        return all(agreeing)

    def _agrees(self, chunk: int, content: int) -> bool:
        known = self._sums[chunk]
        if not known:
            self._sums[chunk] = content
        return known in (0, content)


def _folded(content: int) -> int:
    """Return a sum of 64 bits as one of 32, which is not 0."""
    return (content ^ content >> 32) & 0xFFFFFFFF or 1


def _sums(address: int, length: int, count: int) -> list[int]:
    """Return the sums of `count` pieces of memory, whole pages, that lie one after the other."""
    import numpy as np

    pages = length // _libc.PAGE
    words = np.frombuffer(_libc.view(address, length * count), np.uint64)
    words = words.reshape(count, pages, _libc.PAGE // WORD_BYTES)
    # Words and pages that change places change the sum; as weights are odd, so does each bit.
    word_weights = 2 * np.arange(words.shape[2], dtype=np.uint64) + np.uint64(1)
    page_weights = np.multiply.accumulate(np.full(pages, _ODD, np.uint64))
    sums: list[int] = (np.einsum("cpw,w->cp", words, word_weights) * page_weights).sum(axis=1).tolist()
    return sums


def _ragged_sum(address: int, length: int) -> int:
    """Return the sum of a piece that ends within a page, as the last one of a file may."""
    whole = length - length % _libc.PAGE
    return _sums(address, whole, 1)[0] ^ zlib.crc32(_libc.view(address + whole, length - whole))
