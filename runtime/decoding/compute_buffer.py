"""llama.cpp's compute buffer: where it is, how many of its pages are in memory, and how to free them.

The buffer is reserved for a pass of a whole micro-batch, and keeps nothing from one pass to the next: llama.cpp sets
the inputs of every pass anew, and each node's result is written before it is read. So its pages may be freed between
two passes; the kernel gives zeroed pages where the next pass touches it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from edge_run.base.units import round_down, round_up
from edge_run.runtime.llama import _ggml as ggml
from edge_run.tiers import _libc

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


@functools.cache
def touched_page_bytes() -> int:
    """Return how many bytes the kernel maps when one byte is touched, where huge pages were not asked for.

    A huge page has 2 MiB where pages have 4 KiB, but 32 MiB where they have 16 KiB, and 512 MiB where they have 64 KiB.
    """
    try:
        is_huge = "[always]" in (HUGE_PAGES / "enabled").read_text()
        return int((HUGE_PAGES / "hpage_pmd_size").read_text()) if is_huge else _libc.PAGE
    except (OSError, ValueError):
        return _libc.PAGE


class ComputeBuffer:
    """The compute buffer of the pass in progress, or of the last pass. Not thread-safe."""

    def __init__(self) -> None:
        self._start = self._stop = 0

    @property
    def size_bytes(self) -> int:
        """The size of its whole pages; 0 while the buffer is not known."""
        return self._stop - self._start

    def forget(self) -> None:
        """Forget the buffer when a pass begins, as the pass may have another one."""
        self._start = self._stop = 0

    def note(self, address: int) -> bool:
        """Find the buffer from the node at `address`, of the pass in progress; return whether the node has one.

        llama.cpp may make a new buffer for each pass, but does so before it shows the first node.
        """
        found = ggml.compute_buffer(address)
        if found:
            base, size_bytes = found
            self._start = round_up(base, _libc.PAGE)
            self._stop = max(self._start, round_down(base + size_bytes, _libc.PAGE))
        return found is not None

    def touched_bytes(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Return the most memory that the buffer takes when only the (address, bytes) `ranges` are written.

        Ordinary pages are counted as if the buffer began anywhere in a page: llama.cpp may make another one, which
        begins elsewhere, and each row of pages then is one longer.
        """
        pages: set[int] = set()
        page_bytes = touched_page_bytes()
        for address, size_bytes in ranges:
            start, stop = max(address, self._start), min(address + size_bytes, self._stop)
            if start < stop:
                pages.update(range(start // page_bytes, (stop - 1) // page_bytes + 1))
        n_rows = sum(page - 1 not in pages for page in pages) if page_bytes == _libc.PAGE else 0
        return min((len(pages) + n_rows) * page_bytes, self.size_bytes)

    def resident_bytes(self) -> int:
        """Return how much of the buffer is in memory."""
        return _libc.resident_bytes(self._start, self.size_bytes) if self.size_bytes else 0

    def drop(self) -> None:
        """Free the buffer's pages. Only between passes."""
        if self.size_bytes:
            _libc.drop_pages(self._start, self.size_bytes)
