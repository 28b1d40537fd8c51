"""What the kernel's page cache holds of a file, and reads through it.

A file that was read a moment ago may lie there, and copying it from there is faster than any drive. Linux 6.5 says what
it holds (cachestat); before that mincore does, of files that belong to the user or that the user may write to.
"""

from __future__ import annotations

import contextlib
import os

from edge_run.base.units import KIB
from edge_run.tiers import _libc

LEAST_SHARE = 0.9  # of a range: the kernel takes single pages away from files that it keeps, and reads them again
AHEAD_BYTES = 512 * KIB  # that the kernel is told of at a time: of more it takes note of a part only


class PageCache:
    """The page cache of one open file. Thread-safe.

    descriptor: reads through the page cache.
    way: how the kernel is asked what it holds: `cachestat`, `mincore`, or an empty string where it does not say.
    """

    def __init__(self, descriptor: int) -> None:
        """Ask about the file behind `descriptor`, whose own reads are direct. Raises OSError."""
        self.descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        self._mapping = 0
        self._size_bytes = os.fstat(self.descriptor).st_size
        self.way = self._find_way()

    def _find_way(self) -> str:
        with contextlib.suppress(OSError):
            _libc.cached_bytes(self.descriptor, 0, _libc.PAGE)
            return "cachestat"
        is_ours = os.fstat(self.descriptor).st_uid == os.geteuid()
        if self._size_bytes and (is_ours or os.access(f"/proc/self/fd/{self.descriptor}", os.W_OK)):
            with contextlib.suppress(OSError):  # of other files mincore says that all is there
                self._mapping = _libc.map_file(self.descriptor, self._size_bytes)
                return "mincore"
        return ""

    def holds(self, offset: int, length: int, least_share: float = LEAST_SHARE) -> bool:
        """Return whether `length` bytes at `offset` are there, page-aligned, up to the file's end.

        least_share: of them, that is enough.
        """
        length = min(length, self._size_bytes - offset)
        if length <= 0 or not self.way:
            return False
        try:
            if self._mapping:
                found = _libc.resident_bytes(self._mapping + offset, length)
            else:
                found = _libc.cached_bytes(self.descriptor, offset, length)
        except OSError:
            return False
        return found >= least_share * length

    def bring(self, offset: int, length: int) -> None:
        """Have the kernel begin to read `length` bytes at `offset`."""
        with contextlib.suppress(OSError):  # advice only
            for start in range(offset, offset + length, AHEAD_BYTES):
                os.posix_fadvise(self.descriptor, start, AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close it. Idempotent; no read may be under way."""
        if self._mapping:
            _libc.unmap(self._mapping, self._size_bytes)
            self._mapping = 0
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
