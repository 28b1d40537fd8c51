"""Rows of a large table (token embeddings), read one by one, so that only the rows in use take memory.

Pages are kept up to a budget, and the least recently used ones are dropped. Tokens recur, so most rows are in memory
already.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial

from edge_run.base.errors import EdgeRunError
from edge_run.tiers import _libc
from edge_run.tiers.address_space import joined
from edge_run.tiers.readers import Readers, as_read_error
from edge_run.tiers.source import SourceFile


class RowTable:
    """The pages of a part of one mapped file, read on demand. One consumer thread.

    start: the first address, page-aligned.
    stop: the address after the last one, page-aligned.
    is_apart: whether the rows lie in memory of their own (`place_of`), as weights come and go at their addresses.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        file_offset: int,
        source: SourceFile,
        readers: Readers,
        budget_bytes: int,
        is_apart: bool = False,
    ) -> None:
        """Read the table from `source`.

        file_offset: where the byte at `start` lies in the file.
        budget_bytes: the most that stays in memory between calls; one call may need more.
        """
        self.start, self.stop, self.is_apart = start, stop, is_apart
        self._file_offset = file_offset
        self._source = source
        self._readers = readers
        self._max_pages = budget_bytes // _libc.PAGE
        self._pages: OrderedDict[int, None] = OrderedDict()
        length = stop - start
        self._memory = _libc.map_anonymous(length, _libc.PROT_READ_WRITE, at=None if is_apart else start)
        _libc.prepare_for_weights(self._memory, length, is_sparse=True)

    def close(self) -> None:
        """Free memory of its own, when no reader is at work any more. Idempotent."""
        if self.is_apart and self._memory:
            _libc.unmap(self._memory, self.stop - self.start)
            self._memory = 0

    def place_of(self, address: int) -> int:
        """Return where the byte at `address` of the table lies."""
        return self._memory + address - self.start

    def fetch(self, rows: Iterable[tuple[int, int]]) -> float:
        """Make rows readable and return the seconds waited for reads.

        rows: (address, length in bytes) of each; parts outside the table are ignored.

        Raises TierReadError or ModelFileError; the pages that were in memory before stay there.
        """
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
        try:
            self._read(runs)
        except EdgeRunError:
            for run in runs:
                _libc.drop_pages(*run)
            raise
        self._pages.update(dict.fromkeys(missing))
        return time.monotonic() - started if runs else 0.0

    def _pages_of(self, address: int, length: int) -> range:
        first = address - address % _libc.PAGE
        start, stop = max(first, self.start), min(address + length, self.stop)
        return range(self.place_of(start), self.place_of(stop), _libc.PAGE)

    def _read(self, runs: list[tuple[int, int]]) -> None:
        done = threading.Semaphore(0)
        errors: list[EdgeRunError] = []

        def read(address: int, length: int) -> int:
            try:
                return self._source.read_into(address, length, self._file_offset + address - self._memory)
            except Exception as error:  # rows that were not read must not count as read
                errors.append(as_read_error(error))
                return 0
            finally:
                done.release()

        for run in runs:
            self._readers.submit(partial(read, *run), is_urgent=True)
        for _ in runs:
            done.acquire()
        if errors:
            raise errors[0]
