"""Writes complete blocks of rows to their files, in a thread of its own, while passes go on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_run.base.errors import option, reason_of
from edge_run.base.interrupt import Interrupt, JoinedThread, join_all
from edge_run.base.protocols import Clock
from edge_run.base.units import format_size
from edge_run.runtime.keeping.store import PromptStore
from edge_run.tiers.kv.block_file import RowsHead, RowsVoid, copy_part, write_rows
from edge_run.tiers.kv.layout import BLOCK_ROWS, KvLayout, MemoryPart
from edge_run.tiers.kv.saving import SaveJob, SavingBlocks

REST_S = 300.0  # after a failure
HANG_S = 60.0  # that a drive may take for a part of a file, before it is no longer waited for


@dataclass(frozen=True, slots=True)
class BlockToWrite:
    """A block of rows.

    job: which block of the context. head: what its file is of. paths: of the files of blocks up to it, its own last.
    """

    job: SaveJob
    head: RowsHead
    paths: Sequence[Path]


class Copies:
    """The bytes of memory parts, one after the other, until `end`: then the memory may change."""

    def __init__(self, parts: Iterable[MemoryPart]) -> None:
        self._parts, self._lock, self._is_over = parts, threading.Lock(), False

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            with self._lock:
                if self._is_over:
                    raise RowsVoid
                copy = copy_part(part)
            yield copy

    def end(self) -> None:
        """Nothing more is copied."""
        with self._lock:
            self._is_over = True


class BlockWriter:
    """The thread that writes blocks.

    lock: is held while rows are copied; whoever is about to change rows takes it, and tells `states` first.
    written_bytes: what was written. failure: why nothing is written now; empty: nothing failed. After REST_S it is
    tried again, and then all is written that is not there.
    """

    def __init__(
        self, store: PromptStore, layout: KvLayout, states: SavingBlocks, clock: Clock = time.monotonic
    ) -> None:
        self.lock, self.written_bytes = threading.Lock(), 0
        self._clock, self._failed_s, self._moved_s = clock, clock(), time.monotonic()
        self.failure = store.why_no_writes
        self._store, self._layout, self._states = store, layout, states
        self._queue: queue.SimpleQueue[BlockToWrite | None] = queue.SimpleQueue()
        self._thread: JoinedThread | None = None

    def submit(self, block: BlockToWrite) -> None:
        """Have a block written, after those that were submitted before; not where no thread can be started."""
        if self.is_resting:
            return
        if self._thread is None:
            thread = JoinedThread(self._run, "edge-run-keeper")
            try:
                with Interrupt().hearing_signals():  # no thread that nobody knows
                    thread.start()
                    self._thread = thread
            except RuntimeError as error:
                self._fail(str(error))
                return
        self._queue.put(block)

    def close(self) -> None:
        """Write what was submitted, and end the thread; after Ctrl-C without what was not copied yet. Idempotent.

        A drive that takes nothing for HANG_S is not waited for: the thread is left, and reads no rows any more.
        """
        thread, self._thread = self._thread, None
        if thread:
            self._moved_s = time.monotonic()
            self._queue.put(None)
            join_all([thread], self._void_all, self._hangs)
            if not thread.has_ended.is_set():
                self._void_all()
                self._fail("the drive does not answer")

    @property
    def is_resting(self) -> bool:
        """Whether nothing is written now, as something failed less than REST_S ago."""
        return bool(self.failure) and self._clock() - self._failed_s < REST_S

    def resume(self) -> None:
        """After a rest, take all that is not there as to be written; else do nothing."""
        if self.failure and not self.is_resting:
            self.failure = ""
            self._void_all()

    def write(self, paths: Sequence[Path], head: RowsHead, copies: Iterator[bytes]) -> bool:
        """Write one file, the last of `paths`, here and now; return whether it is there.

        Those before it, without which it is of no use, are as new as it is then. After a failure nothing is written for
        a while.
        """
        if self.is_resting:
            return False
        self.resume()
        try:
            if not self._store.has_folder():  # another process removed it
                self._store.make_folder()
                if len(paths) > 1:  # those before it are to be written first
                    self._void_all()
                    return False
            self._store.used(paths)
            if paths[-1].exists():  # another process had the same text
                return True
            may_today = self._store.daily.has_room(head.file_bytes)  # asked first: else others would go in vain
            if may_today and not self._store.make_room(head.file_bytes, frozenset(paths)):
                self._fail(f"no room for {head.file_bytes:,} bytes more")
                return False
            if not (may_today and self._store.daily.take(head.file_bytes)):
                written = format_size(self._store.daily.written_bytes)
                self._fail(f"{written} were written today ({option('prompt_cache_daily')})")
                return False
            self.written_bytes += write_rows(paths[-1], head, copies)
        except RowsVoid:
            return False
        except Exception as error:  # of memory, too: the thread goes on, and what is submitted does not add up
            self._fail(reason_of(error))
            return False
        self._store.used(paths)
        return True

    def _hangs(self) -> bool:
        return time.monotonic() - self._moved_s > HANG_S

    def _fail(self, why: str) -> None:
        self._failed_s, self.failure = self._clock(), why

    def _void_all(self) -> None:
        with self.lock:
            self._states.cut(0)

    def _run(self) -> None:
        while (block := self._queue.get()) is not None:
            with self.lock:
                begins = self._states.begins(block.job)
            if begins:
                start = block.job.block * BLOCK_ROWS
                parts = self._layout.row_parts(start, start + BLOCK_ROWS)
                is_kept = self.write(block.paths, block.head, self._copies(block.job, parts))
                self._moved_s = time.monotonic()
                with self.lock:
                    self._states.ended(block.job, is_kept=is_kept)

    def _copies(self, job: SaveJob, parts: Iterator[MemoryPart]) -> Iterator[bytes]:
        for part in parts:
            with self.lock:
                if not self._states.is_valid(job):
                    raise RowsVoid
                copy = copy_part(part)
            self._moved_s = time.monotonic()
            yield copy
