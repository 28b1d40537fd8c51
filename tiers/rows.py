"""Rows of a large table (token embeddings), read one by one, so that only the rows in use take memory.

Pages are kept up to a budget, and the least recently used ones are dropped. Tokens recur, so most rows are in memory
already.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

from edge_run.base.errors import EdgeRunError
from edge_run.base.interrupt import go_on
from edge_run.tiers import _libc
from edge_run.tiers.address_space import joined
from edge_run.tiers.content_sums import ContentSums
from edge_run.tiers.readers import AwaitedJob, Readers
from edge_run.tiers.source import SourceFile, read_patiently


@dataclass(frozen=True, slots=True)
class RowRange:
    """The part of a table that is read by row, and the memory for its rows.

    start: its first address.
    stop: the address after its last one.
    shard: the number of the file.
    file_offset: where it begins in the file.
    budget_bytes: the memory for its rows.
    is_apart: whether that memory lies elsewhere, as the table is also a matrix that streams. Else it is the inside of
        the table, whole chunks, where no weights come and go.
    """

    start: int
    stop: int
    shard: int
    file_offset: int
    budget_bytes: int
    is_apart: bool = False

    @property
    def length(self) -> int:
        """Its bytes."""
        return self.stop - self.start


class RowTable:
    """The pages of a part of one mapped file, `range`, read on demand. One consumer thread."""

    def __init__(
        self,
        range: RowRange,
        source: SourceFile,
        readers: Readers,
        check: Callable[[], None] = go_on,
    ) -> None:
        """Read the table from `source`; between calls its budget is the most that stays, one call may need more.

        check: runs while reads are waited for, and may raise to stop that: a drive may hang.
        """
        self.range, self._source, self._readers, self._check = range, source, readers, check
        self._reads: list[tuple[AwaitedJob, tuple[int, int]]] = []  # and where each writes to, as long as it may
        self._is_stopped = False  # whether nobody wants these reads any more
        self._max_pages = range.budget_bytes // _libc.PAGE
        self._pages: OrderedDict[int, None] = OrderedDict()
        self._sums = ContentSums(range.length // _libc.PAGE)
        at = None if range.is_apart else range.start
        self._memory = _libc.map_anonymous(range.length, _libc.PROT_READ_WRITE, at=at)
        _libc.advise_working_memory(self._memory, range.length, is_sparse=True)

    def close(self) -> None:
        """Free memory of its own, when no reader is at work any more. Idempotent."""
        if self.range.is_apart and self._memory:
            _libc.unmap(self._memory, self.range.length)
            self._memory = 0

    def place_of(self, address: int) -> int:
        """Return where the byte at `address` of the table lies."""
        return self._memory + address - self.range.start

    def fetch(self, rows: Iterable[tuple[int, int]]) -> float:
        """Make rows readable and return the seconds waited for reads.

        rows: (address, length in bytes) of each; parts outside the table are ignored.

        Raises TierReadError, ModelFileError and what `check` raises; the pages that were in memory before stay there.
        """
        if self._reads:
            self._await_reads()
            self._give_back()
        needed = {page for address, length in rows for page in self._pages_of(address, length)}
        for page in needed & self._pages.keys():
            self._pages.move_to_end(page)
        missing = sorted(needed - self._pages.keys())
        while self._pages and len(self._pages) + len(missing) > self._max_pages:
            oldest = next(iter(self._pages))
            if oldest in needed:
                break
            del self._pages[oldest]
            _libc.drop_pages(oldest, _libc.PAGE)
        runs = joined((page, _libc.PAGE) for page in missing)
        started = time.monotonic()
        if runs:
            self._begin_reads(runs)
            if error := self._await_reads():
                self._give_back()
                raise error
            self._reads.clear()
        self._pages.update(dict.fromkeys(missing))
        return time.monotonic() - started if runs else 0.0

    def _pages_of(self, address: int, length: int) -> range:
        first = address - address % _libc.PAGE
        start, stop = max(first, self.range.start), min(address + length, self.range.stop)
        return range(self.place_of(start), self.place_of(stop), _libc.PAGE)

    def _begin_reads(self, runs: Sequence[tuple[int, int]]) -> None:
        self._is_stopped = False
        self._reads = [(AwaitedJob(partial(self._read, *run)), run) for run in runs]
        for read, _ in self._reads:
            self._readers.submit(read, is_urgent=True)

    def _read(self, address: int, length: int) -> int:
        if self._is_stopped:
            return 0
        offset = self.range.file_offset + address - self._memory
        n_bytes = read_patiently(lambda: self._source.read_into(address, length, offset), lambda: self._is_stopped)
        first, n_pages = (address - self._memory) // _libc.PAGE, length // _libc.PAGE
        pages = range(first, first + n_pages)
        self._sums.compare(self._source, pages, address, offset, repeat(_libc.PAGE, n_pages))
        return n_bytes

    def _await_reads(self) -> EdgeRunError | None:
        """Wait until all reads have ended; return what failed. Where `check` raises, those not begun are not made."""
        try:
            failures = [error for read, _ in self._reads if (error := read.wait(self._check))]
        except BaseException:
            self._is_stopped = True
            raise
        return failures[0] if failures else None

    def _give_back(self) -> None:
        """Give back the pages of reads whose rows do not count, and none of which can write there any more."""
        for _, run in self._reads:
            _libc.drop_pages(*run)
        self._reads.clear()
