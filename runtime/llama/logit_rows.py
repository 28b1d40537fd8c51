"""Memory for the logits that passes give: the rows that llama.cpp writes, and copies that outlive a pass."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

from edge_run.base.protocols import Logits
from edge_run.base.units import round_down, round_up
from edge_run.tiers import _libc
from edge_run.tiers.kv.cells import LEAST_SPARSE_BYTES

LOGIT_BYTES = 4
_LEAST_MAPPED_BYTES = 1 << 20


def idle_row_bytes(n_rows: int, vocabulary: int) -> int:
    """Return what `LogitRows.free` gives back at least: whole pages inside llama.cpp's rows and those of a batch."""
    n_bytes = LOGIT_BYTES * n_rows * vocabulary
    return max(0, n_bytes - 2 * _libc.PAGE) * (2 if n_bytes >= _LEAST_MAPPED_BYTES else 1)


class LogitRows:
    """The rows of a context, `(rows, vocabulary)`: llama.cpp's, one for each output of a pass, and those of a batch.

    The latter are the same memory for each batch, but for those of many passes.

    is_lent: whether others have the memory of rows that are not in use.
    """

    def __init__(self, most_rows: int, vocabulary: int, own_rows: int = 0, own: Callable[[], int] = lambda: 0) -> None:
        """most_rows: of a batch in the memory that stays, which is made for the first one.

        own_rows: for which llama.cpp has memory now, more once a pass has more outputs. own: returns the address of it,
        0 where it must be left alone.
        """
        self._most_rows, self._vocabulary, self._own = most_rows, vocabulary, own
        self._own_rows = self._own_dirty = own_rows
        self._seen = 0, 0  # where llama.cpp's rows were, and how many, when they were freed last
        self._memory: mmap.mmap | bytearray = bytearray()
        self._rows: Logits | None = None
        self._dirty = 0
        self.is_lent = False

    def take(self, n_rows: int) -> Logits:
        """Return rows to be written; they are valid until they are asked for again."""
        if n_rows > self._most_rows:
            return self._new(n_rows)[1]
        if self._rows is None:
            self._memory, self._rows = self._new(self._most_rows)
            if not isinstance(self._memory, mmap.mmap):  # else no memory is taken before they are written
                self._dirty = self._most_rows
        if self.is_lent and n_rows < self._dirty:
            self._drop_from(n_rows)
        self._dirty = max(self._dirty, n_rows)
        return self._rows[:n_rows]

    def note_pass(self, n_outputs: int) -> None:
        """Note that llama.cpp has computed a pass with so many outputs, which have memory from now on."""
        self._own_rows, self._own_dirty = (max(n, n_outputs) for n in (self._own_rows, self._own_dirty))

    def needed_bytes(self, n_outputs: int) -> int:
        """Return what all rows take, beyond one of each kind, with a pass of `n_outputs` outputs that is next.

        Those of llama.cpp's that the pass does not write are freed. Only between passes.
        """
        if n_outputs < self._own_dirty:
            self._drop_own_from(n_outputs)
        return (max(0, n_outputs - 1) + max(0, self._dirty - 1)) * self._row_bytes

    def free(self) -> None:
        """Free all. Only between passes, when nothing of them is needed any more."""
        self._drop_own_from(0)
        self._drop_from(0)

    @property
    def _row_bytes(self) -> int:
        return LOGIT_BYTES * self._vocabulary

    def _drop_own_from(self, n_rows: int) -> None:
        """Free llama.cpp's rows from `n_rows` on, as far as any were written."""
        if not (base := self._own()):
            return
        start = round_up(base + n_rows * self._row_bytes, _libc.PAGE)
        stop = round_down(base + self._own_dirty * self._row_bytes, _libc.PAGE)
        with contextlib.suppress(OSError):  # a system without such calls has no use for it
            if self._seen != (base, self._own_rows) and stop - base >= LEAST_SPARSE_BYTES:  # a mapping of its own
                first = round_up(base, _libc.PAGE)
                _libc.use_small_pages(first, stop - first)  # only some rows will be in use
                self._seen = base, self._own_rows
            if start < stop:
                _libc.drop_pages(start, stop - start)
            self._own_dirty = n_rows

    def _drop_from(self, n_rows: int) -> None:
        if isinstance(self._memory, mmap.mmap):
            start, stop = round_up(n_rows * self._row_bytes, _libc.PAGE), round_down(len(self._memory), _libc.PAGE)
            if start < stop:
                self._memory.madvise(mmap.MADV_DONTNEED, start, stop - start)
            self._dirty = n_rows

    def _new(self, n_rows: int) -> tuple[mmap.mmap | bytearray, Logits]:
        """Return memory for rows, where it is much so that all of it can be given back: the C library keeps pieces."""
        import numpy as np  # which takes long to load, and who follows without logits does without

        n_bytes = self._row_bytes * n_rows
        memory = _private_memory(n_bytes) if n_bytes >= _LEAST_MAPPED_BYTES else bytearray(n_bytes)
        return memory, np.frombuffer(memory, np.float32).reshape(n_rows, -1)


def _private_memory(n_bytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, n_bytes)
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # what is shared keeps its pages
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
