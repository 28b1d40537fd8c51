"""The memory of a context's caches, of which nothing is taken before it is written to.

llama.cpp allocates a cache for all the tokens that its context may have, and clears it, which takes all of it at once.
Between the two it logs the cache's size. At that moment one small piece of memory is laid under the whole cache, so
that clearing it takes no more than that piece. Once the context is made, fresh memory is laid there instead: it reads
as zeros like a cache that was cleared, and takes a page where something is written.

A cache that is not found, as a small one that the allocator cut from its heap, is left as it is; so are all where the
system allows no files in memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from edge_run.base.units import MIB, round_down, round_up
from edge_run.devices.host.memory import count_peak_anew, process_memory
from edge_run.runtime.llama import _ggml as ggml
from edge_run.tiers import _libc
from edge_run.tiers.kv.cells import LEAST_SPARSE_BYTES

logger = logging.getLogger(__name__)

MAPS = Path("/proc/self/maps")
HUGE_PAGE = 2 * MIB
MOST_PIECES = 4096  # mappings of one cache while it is cleared, of which Linux allows 65,530 in all
_ABOUT_TO_ALLOCATE = b": dev = "  # said of each layer, right before
_HAS_ALLOCATED = b"buffer size"
_ALLOCATED = re.compile(rb"KV buffer size =\s*([\d.]+) MiB")
_ANONYMOUS = re.compile(rb"^(\w+)-(\w+) rw-p \S+ \S+ \S+ *$", re.MULTILINE)
_HEADER_BYTES = 64  # of the allocator, and what ggml keeps before a buffer's own bytes
_FLAGS, _IS_MAPPED = 7, 2  # glibc keeps flags beside a size; of them, that the allocation is a mapping of its own


class CacheMemory:
    """Finds the caches of one context while llama.cpp makes it. ranges: where they are, (address, bytes).

    The allocator takes no cache from its heap: from the first of these on, large allocations are mappings of their own,
    and while a context is made, the heap has no room for one.
    """

    def __init__(self) -> None:
        _libc.map_large_allocations(LEAST_SPARSE_BYTES)
        self.ranges: list[tuple[int, int]] = []
        self._before: list[tuple[int, int]] = []
        self._is_listed = False  # since the last allocation: to list what is mapped takes longer than all else here
        self._peak_bytes = 0

    @property
    def size_bytes(self) -> int:
        """All that was found."""
        return sum(length for _, length in self.ranges)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Lay next to nothing under the caches that are made in this block; `settle` follows."""
        with _libc.full_heap(LEAST_SPARSE_BYTES), ggml.log.overhearing(self._hear):
            yield

    def settle(self, *, is_made: bool) -> None:
        """Lay fresh memory under the caches of a context that is made; those of one that failed are freed already."""
        for address, length in self.ranges if is_made else ():
            _libc.map_anonymous(length, at=address)
            _libc.advise_working_memory(address, length, is_sparse=True)
        if self.ranges:
            count_peak_anew(self._peak_bytes)

    def _hear(self, text: bytes) -> None:
        if _ABOUT_TO_ALLOCATE in text:
            if not self._is_listed:
                self._before, self._is_listed = _anonymous(), True
        elif _HAS_ALLOCATED in text:
            self._is_listed = False
            found = _ALLOCATED.search(text)
            if found and (size_bytes := int(float(found[1]) * MIB)) >= LEAST_SPARSE_BYTES:
                self._take(size_bytes)

    def _take(self, size_bytes: int) -> None:
        """Lay a small piece of memory under the cache of about `size_bytes` bytes that has just been allocated."""
        now = _anonymous()
        try:
            found = (_allocation_in(one, new, size_bytes) for one in now for new in _new(one, self._before))
            place = next(filter(None, found), None)
            if place is None:
                return
            descriptor = _libc.memory_file("edge-run-cache")
        except OSError as error:  # a sandbox may allow neither
            logger.info("caches take all their memory at once: %s", error)
            return
        if not self.ranges:
            self._peak_bytes = process_memory().peak_bytes
        start, stop = place[0] + _libc.PAGE, place[1] - _libc.PAGE
        piece_bytes = max(HUGE_PAGE, round_up((stop - start) // MOST_PIECES, HUGE_PAGE))
        first = min(stop, round_up(start, HUGE_PAGE))
        try:
            os.ftruncate(descriptor, piece_bytes)
            borders = sorted({start, *range(first, stop, piece_bytes), stop})
            for address, end in pairwise(borders):
                _libc.map_shared(descriptor, end - address, at=address)
            _libc.join_pages(first, round_down(min(piece_bytes, stop - first), HUGE_PAGE))  # it is in every piece
        finally:
            os.close(descriptor)
            self.ranges.append((start, stop - start))


def _anonymous() -> list[tuple[int, int]]:
    """Return what this process has mapped without a file, (start, stop)."""
    try:
        return [(int(start, 16), int(stop, 16)) for start, stop in _ANONYMOUS.findall(MAPS.read_bytes())]
    except OSError:  # there is no such file
        return []


def _new(now: tuple[int, int], before: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the parts of `now` that were not there `before`; the kernel joins new mappings to old ones beside them."""
    at, stop = now
    for old_start, old_stop in sorted((a, b) for a, b in before if a < stop and b > at):
        if at < old_start:
            yield at, old_start
        at = max(at, old_stop)
    if at < stop:
        yield at, stop


def _allocation_in(place: tuple[int, int], new: tuple[int, int], size_bytes: int) -> tuple[int, int] | None:
    """Return where in `place` an allocation of about `size_bytes` lies, as the allocator's own header in it says.

    new: the part of `place` that came last. Some of the allocation is in it; the rest may lie where Python had memory
    when it was listed. Memory that Python has mapped since is in `place` too. llama.cpp says sizes in hundredths of a
    MiB.
    """
    error_bytes = MIB // 100 + 2 * _libc.PAGE
    first = max(place[0], round_down(new[0] - size_bytes - error_bytes, _libc.PAGE))
    last = min(new[1] - _libc.PAGE, place[1] - size_bytes + error_bytes)
    with open("/proc/self/mem", "rb", buffering=0) as memory:  # so that what is unmapped meanwhile is an error
        for at in range(first, last + 1, _libc.PAGE):
            try:
                header = os.pread(memory.fileno(), _HEADER_BYTES, at)
            except OSError:
                continue
            stop = at + _mapped_bytes(header)
            if abs(stop - at - size_bytes) <= error_bytes and new[0] < stop <= place[1]:
                return at, stop
    return None


def _mapped_bytes(page: bytes) -> int:
    """Return the length of a mapping that is one allocation of the C library's, by its first bytes; else 0.

    A chunk begins with how much of the mapping is before it, to align it, and its own size with flags.
    """
    words = [int.from_bytes(page[i : i + 8], sys.byteorder) for i in range(0, len(page), 8)]
    for i in range(0, len(words) - 1, 2):
        length = 8 * i + (words[i + 1] & ~_FLAGS)
        if words[i] == 8 * i and words[i + 1] & _FLAGS == _IS_MAPPED and length % _libc.PAGE == 0:
            return length
    return 0
