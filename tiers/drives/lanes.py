"""Threads that read from one drive for others, who may stop waiting.

A read that hangs in the kernel cannot be ended, and may still write to its memory when the drive comes back. So reads
go to buffers, and the buffer of a read that nobody waits for any more belongs to it until it has ended.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from edge_run.base.interrupt import JoinedThread, join_all
from edge_run.tiers import _libc

PART_BYTES = 2 << 20  # of a buffer, and so the most that one read brings


class Reading:
    """One read into `buffer`, under way."""

    def __init__(self, read: Callable[[int], int], buffer: int) -> None:
        """read: fills memory at an address, and returns the bytes read."""
        self._read, self._buffer = read, buffer
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._on_end: Callable[[], object] | None = None
        self._n_bytes = 0
        self._error: Exception | None = None

    def run(self) -> None:
        """Read. Raises nothing."""
        try:
            self._n_bytes = self._read(self._buffer)
        except Exception as error:
            self._error = error
        with self._lock:
            self._ended.set()
            on_end = self._on_end
        if on_end:
            _libc.unmap(self._buffer, PART_BYTES)
            on_end()

    def has_ended(self, patience_s: float) -> bool:
        """Wait at most `patience_s` for the end."""
        return self._ended.wait(patience_s)

    def leave(self, on_end: Callable[[], object]) -> bool:
        """Wait no more, and leave the buffer to the read; return False where it has ended after all.

        on_end: is called when the read has ended and the buffer is free.
        """
        with self._lock:
            if self._ended.is_set():
                return False
            self._on_end = on_end
            return True

    @property
    def n_bytes(self) -> int:
        """The bytes that were read. Raises what the read raised."""
        if self._error is not None:
            raise self._error
        return self._n_bytes


class Lane:
    """Daemon threads that read from one drive. Thread-safe."""

    def __init__(self, n_threads: int, drive: int) -> None:
        self._queue: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._threads: list[JoinedThread] = []
        try:
            for number in range(n_threads):
                thread = JoinedThread(self._run, f"edge-run-drive-{drive}-{number}")
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close(is_answering=True)
            raise

    def submit(self, reading: Reading) -> None:
        """Have `reading` run as soon as a thread is idle."""
        self._queue.put(reading)

    def close(self, *, is_answering: bool) -> None:
        """End the threads, and wait for that unless a read hangs. Idempotent."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)
        if is_answering:
            join_all(threads)

    def _run(self) -> None:
        while (reading := self._queue.get()) is not None:
            reading.run()
