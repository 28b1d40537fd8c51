"""Reader threads, which run jobs: first come, first served, and urgent jobs ahead of the others.

A job is a callable that reads and returns the number of bytes it read. A job reports its errors to its maker, through
`as_read_error`, and raises none; a thread survives a job that raises. Who waits for single jobs makes each an
`AwaitedJob`. The totals are counted here: bytes, seconds with at least one read in flight, CPU seconds. What a thread
needs room for besides, it has in memory of its own (`ThreadMemory`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from edge_run.base.errors import EdgeRunError, TierReadError, from_system
from edge_run.base.interrupt import CHECK_S, JoinedThread, join_all
from edge_run.base.protocols import Clock
from edge_run.tiers import _libc

logger = logging.getLogger(__name__)

Job = Callable[[], int]


def as_read_error(error: Exception) -> EdgeRunError:
    """Return `error` as one of our errors, which a job that failed with it reports."""
    if isinstance(error, EdgeRunError):
        return error
    if isinstance(error, OSError | MemoryError):
        return from_system(error, "reading weights")
    logger.error("a reader thread failed", exc_info=error)
    return TierReadError(f"a reader thread failed: {error!r}; please report this")


class AwaitedJob:
    """A job for which one thread waits, and which may fail.

    has_ended: whether it was done, or has failed.
    error: why it failed.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._bell = job, threading.Lock()
        self._bell.acquire()
        self.has_ended = False
        self.error: EdgeRunError | None = None

    def __call__(self) -> int:
        """Do the job; return the bytes read. Raises nothing."""
        n_bytes = 0
        try:
            n_bytes = self._job()
        except Exception as error:  # whatever it is, nobody must wait for ever
            self.error = as_read_error(error)
        self.has_ended = True
        self._bell.release()
        return n_bytes

    def wait(self, check: Callable[[], None]) -> EdgeRunError | None:
        """Wait until it has ended; return why it failed, if it did.

        check: runs meanwhile, at least once, and may raise to stop; the job goes on then.
        """
        check()
        while not self.has_ended:
            self._bell.acquire(timeout=CHECK_S)
            check()
        return self.error


@dataclass(frozen=True, slots=True)
class ReadTotals:
    """What was read since the start.

    bytes_read: bytes that came from storage, or the page cache.
    busy_s: wall time in which at least one read was in flight.
    cpu_s: CPU time of the threads.
    copy_bytes: what of it came from a second drive.
    repeated_reads: reads that were done again from the other of two drives.
    cached_bytes: what of it was in the page cache.
    """

    bytes_read: int = 0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    copy_bytes: int = 0
    repeated_reads: int = 0
    cached_bytes: int = 0

    def __add__(self, more: ReadTotals) -> ReadTotals:
        if more is NOTHING_READ:
            return self
        return ReadTotals(
            self.bytes_read + more.bytes_read,
            self.busy_s + more.busy_s,
            self.cpu_s + more.cpu_s,
            self.copy_bytes + more.copy_bytes,
            self.repeated_reads + more.repeated_reads,
            self.cached_bytes + more.cached_bytes,
        )

    def since(self, earlier: ReadTotals) -> ReadTotals:
        """Return the totals of what came after `earlier`."""
        if self is earlier:
            return NOTHING_READ
        return ReadTotals(
            self.bytes_read - earlier.bytes_read,
            self.busy_s - earlier.busy_s,
            self.cpu_s - earlier.cpu_s,
            self.copy_bytes - earlier.copy_bytes,
            self.repeated_reads - earlier.repeated_reads,
            self.cached_bytes - earlier.cached_bytes,
        )

    def part(self, share: float) -> ReadTotals:
        """Return a share of it."""
        if self is NOTHING_READ:
            return self
        counts = self.bytes_read, self.copy_bytes, self.repeated_reads, self.cached_bytes
        n_bytes, *others = (round(share * count) for count in counts)
        return ReadTotals(n_bytes, self.busy_s * share, self.cpu_s * share, *others)


NOTHING_READ = ReadTotals()  # as in each pass of a model that fits, where these sums would be a part of Python's share


class ThreadMemory:
    """Memory of `size_bytes` for each thread that asks for it, page-aligned. Thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes, self._own, self._lock = size_bytes, threading.local(), threading.Lock()
        self._addresses: list[int] = []

    def mine(self) -> int:
        """Return the address of this thread's memory, which it keeps until all is freed."""
        if not hasattr(self._own, "address"):
            self._own.address = _libc.map_anonymous(self._size_bytes)
            with self._lock:
                self._addresses.append(self._own.address)
        address: int = self._own.address
        return address

    def close(self) -> None:
        """Free it; no thread may be at work any more. Idempotent."""
        with self._lock:
            while self._addresses:
                _libc.unmap(self._addresses.pop(), self._size_bytes)


class Readers:
    """Daemon threads that serve one queue; `set_active` limits how many do. Thread-safe.

    A thread without work waits for a bell of its own, a lock that whoever has work for it releases. Of several, the one
    that came last is woken, so that no more threads than are needed take turns.
    """

    def __init__(self, n_threads: int, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._idle, self._resting = list[threading.Lock](), list[threading.Lock]()  # the bells of those that wait
        self._n_active = n_threads
        self._urgent: deque[Job] = deque()
        self._jobs: deque[Job] = deque()
        self._is_closed = self._is_left = False
        self._in_flight = 0
        self._busy_since = 0.0
        self._totals = NOTHING_READ
        self._bytes_read, self._busy_s, self._cpu_s = 0, 0.0, 0.0  # not in the totals yet
        self._threads: list[JoinedThread] = []
        try:
            for i in range(n_threads):
                thread = JoinedThread(partial(self._run, i), f"edge-run-reader-{i}")
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def submit(self, job: Job, is_urgent: bool = False) -> None:
        """Queue `job`; an urgent job goes ahead of all that are not urgent."""
        with self._lock:
            (self._urgent if is_urgent else self._jobs).append(job)
            if self._idle:
                _wake_last(self._idle)

    def hasten(self, job: Job) -> None:
        """Make `job` urgent, if it is still queued."""
        with self._lock, contextlib.suppress(ValueError):
            self._jobs.remove(job)
            self._urgent.append(job)

    def set_active(self, n_threads: int) -> None:
        """Let `n_threads` of the threads, at least one, take jobs from now on; the others finish theirs and rest."""
        with self._lock:
            self._n_active = max(1, n_threads)
            self._wake_all()

    @property
    def totals(self) -> ReadTotals:
        """The totals so far; a read in flight counts up to now."""
        with self._lock:
            if self._bytes_read or self._busy_s or self._cpu_s:
                self._totals += ReadTotals(self._bytes_read, self._busy_s, self._cpu_s)
                self._bytes_read, self._busy_s, self._cpu_s = 0, 0.0, 0.0
            if not self._in_flight:
                return self._totals
            return self._totals + ReadTotals(busy_s=self._clock() - self._busy_since)

    def close(self) -> None:
        """Drop the queued jobs, let reads in flight finish, and join the threads. Idempotent.

        Who insisted on an end while a read hung (`join_all`) need not insist again.
        """
        with self._lock:
            self._is_closed = True
            self._urgent.clear()
            self._jobs.clear()
            self._wake_all()
        stops = list[None]()
        try:
            join_all(self._threads, lambda: stops.append(None), lambda: self._is_left)
        except BaseException:
            self._is_left = len(stops) > 1 and not all(thread.has_ended.is_set() for thread in self._threads)
            raise

    def _wake_all(self) -> None:
        for waiting in (self._idle, self._resting):
            while waiting:
                _wake_last(waiting)

    def _run(self, number: int) -> None:
        bell, counted_cpu_s = threading.Lock(), 0.0
        bell.acquire()
        while (job := self._await_job(number, bell)) is not None:
            n_bytes = 0
            try:
                n_bytes = job()
            except Exception:
                logger.exception("a read was not reported")
            with self._lock:
                self._in_flight -= 1
                if self._in_flight == 0:
                    self._busy_s += self._clock() - self._busy_since
                cpu_s = time.thread_time()
                self._bytes_read += n_bytes
                self._cpu_s += cpu_s - counted_cpu_s
                counted_cpu_s = cpu_s

    def _await_job(self, number: int, bell: threading.Lock) -> Job | None:
        """Wait for a job for thread `number`, and take it; None when there will be no more.

        Resting threads wait apart, where new jobs do not wake them.
        """
        while True:
            with self._lock:
                for waiting in (self._idle, self._resting):
                    if bell in waiting:  # Ctrl-C came while it was rung
                        waiting.remove(bell)
                if self._is_closed:
                    return None
                is_resting = number >= self._n_active
                if not is_resting and (queue := self._urgent or self._jobs):
                    if self._in_flight == 0:
                        self._busy_since = self._clock()
                    self._in_flight += 1
                    return queue.popleft()
                (self._resting if is_resting else self._idle).append(bell)
            bell.acquire()


def _wake_last(waiting: list[threading.Lock]) -> None:
    """Ring the bell that was left last. It is in the list until it has rung, so that Ctrl-C in between loses none."""
    with contextlib.suppress(RuntimeError):  # it has rung, and its thread is not awake yet
        waiting[-1].release()
    waiting.pop()
