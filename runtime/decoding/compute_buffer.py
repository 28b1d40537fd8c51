"""The memory that llama.cpp computes in: where it is, how much of it is touched, and how to give it back.

It is reserved for the widest pass, and keeps nothing from one pass to the next: llama.cpp sets the inputs of every pass
anew, and each node's result is written before it is read. So between two passes its pages may be freed; what the next
pass touches is there again, as zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from edge_run.base.units import MIB, round_down, round_up
from edge_run.runtime.llama import _ggml as ggml
from edge_run.tiers import _libc

HUGE_PAGE_BYTES = 2 * MIB
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@functools.cache
def touched_page_bytes() -> int:
    """Return what the kernel gives where a byte is touched of memory that nobody asked huge pages for."""
    try:
        return HUGE_PAGE_BYTES if "[always]" in HUGE_PAGES.read_text() else _libc.PAGE
    except OSError:
        return _libc.PAGE


class ComputeBuffer:
    """The buffer of the pass in progress, or of the last one. Not thread-safe."""

    def __init__(self) -> None:
        self._start = self._stop = 0

    @property
    def size_bytes(self) -> int:
        """Its whole pages; 0 before there was a pass."""
        return self._stop - self._start

    def forget(self) -> None:
        """A pass begins, which may have another buffer: this one must not be touched any more."""
        self._start = self._stop = 0

    def note(self, address: int) -> bool:
        """Find the buffer by a node of the pass in progress; return whether the node lies in it.

        llama.cpp may have another one in each pass, but makes it before it shows the first node.
        """
        found = ggml.compute_buffer(address)
        if found:
            base, size_bytes = found
            self._start = round_up(base, _libc.PAGE)
            self._stop = max(self._start, round_down(base + size_bytes, _libc.PAGE))
        return found is not None

    def touched_bytes(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Return what it takes at most when only `ranges`, (address, bytes), are written; those elsewhere count not."""
        pages: set[int] = set()
        page_bytes = touched_page_bytes()
        for address, size_bytes in ranges:
            start, stop = max(address, self._start), min(address + size_bytes, self._stop)
            if start < stop:
                pages.update(range(start // page_bytes, (stop - 1) // page_bytes + 1))
        return min(len(pages) * page_bytes, self.size_bytes)

    def resident_bytes(self) -> int:
        """Return what it takes now."""
        return _libc.resident_bytes(self._start, self.size_bytes) if self.size_bytes else 0

    def drop(self) -> None:
        """Give its memory back to the kernel. Only between passes."""
        if self.size_bytes:
            _libc.drop_pages(self._start, self.size_bytes)
