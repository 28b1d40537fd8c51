"""Weights in memory: carries out the decisions of a `Residency` or `OnDemand` on an `AddressSpace`, with `Readers`.

`Weights` is what both kinds have. `WeightsInOrder` stream in an order that is known, and some are pinned; of
`WeightsOnDemand` only their users know what comes next, and they may have more frames or fewer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic, TypeVar

from edge_run.base.errors import BudgetError, EdgeRunError, TierReadError, option
from edge_run.base.interrupt import CHECK_S, go_on
from edge_run.base.protocols import Clock
from edge_run.base.units import MIB
from edge_run.tiers.address_space import AddressSpace, FrameMoves
from edge_run.tiers.chunk_states import Load
from edge_run.tiers.content_sums import ContentSums
from edge_run.tiers.on_demand import OnDemand
from edge_run.tiers.readers import Readers, as_read_error
from edge_run.tiers.residency import Residency
from edge_run.tiers.source import PASSING, PAUSE_S, Source

logger = logging.getLogger(__name__)

MAX_READ_CHUNKS = 4
READ_BYTES = 8 * MIB  # of small chunks in a row
GUESS_BYTES = 2 * MIB  # of chunks that perhaps nobody needs

States = TypeVar("States", bound=Residency | OnDemand)


class Weights(Generic[States]):
    """The DRAM tier of one model. One consumer thread acquires and releases; the readers do the rest.

    read_bytes: what they read for it so far.
    """

    def __init__(
        self,
        address_space: AddressSpace,
        sources: Sequence[Source],
        readers: Readers,
        states: States,
        clock: Clock = time.monotonic,
        run_chunks: int = MAX_READ_CHUNKS,
        check: Callable[[], None] = go_on,
        *,
        compares: bool = True,
    ) -> None:
        """Manage the chunks of `address_space`.

        sources: the shards, by number. readers: the threads that read.
        states: decides which chunks are in memory. run_chunks: the most chunks that one read brings.
        check: runs while the consumer waits, and may raise to stop; the chunks being acquired are then not held.
        compares: whether what is read again is compared with what was read first; off where the sources change, or
            where nothing is read twice.
        """
        self._address_space, self._sources, self._readers = address_space, sources, readers
        self._states, self._clock, self._check = states, clock, check
        self._run_chunks, self._compares = run_chunks, compares
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._moves, self._sums = FrameMoves(address_space), ContentSums(address_space.n_chunks)
        self._leaving: deque[int] = deque()  # released by the consumer, not yet in `_states`
        self._asked = self.read_bytes = 0
        self._patient: dict[int, Callable[[], int]] = {}  # queued reads that nobody waits for, by chunk
        self._tried_again: set[int] = set()  # chunks that are waited for, whose read failed once
        self._error: EdgeRunError | None = None
        self._exposed: list[int] | None = None
        self._delayed: list[tuple[list[Load], int | None]] = []

    def acquire(self, chunks: Iterable[int]) -> float:
        """Hold `chunks`; return the seconds waited until all are readable.

        Raises TierReadError or ModelFileError when one cannot be read, BudgetError when there are too few frames for
        all chunks that are held. After an error none of `chunks` is held by this call.
        """
        chunks = list(chunks)
        with self._lock:
            self._error = None
            self._tried_again.clear()
            self._asked += 1
            try:
                self._let_go()
                self._submit(self._states.acquire(chunks))
                if not self._states.is_waiting:
                    return 0.0
                started = self._clock()
                self._hasten(chunks)
                while self._states.is_waiting and self._error is None:
                    if self._states.is_stuck:
                        raise BudgetError(f"memory: too few frames for a step; raise {option('memory')}")
                    self._await_change()
                if self._error is not None:
                    raise self._error
            except BaseException:
                self._submit(self._states.release(chunks))
                self._changed.notify_all()
                raise
            return self._clock() - started

    def release(self, chunks: Iterable[int]) -> None:
        """Release `chunks`, and read ahead into their frames."""
        self._leaving.extend(chunks)
        with self._lock:
            self._let_go()

    def release_soon(self, chunks: Iterable[int]) -> None:
        """Have a reader release `chunks` while the consumer goes on, at the latest before it acquires again."""
        self._leaving.extend(chunks)
        self._readers.submit(self._release_there, is_urgent=True)

    def expose(self, but: Collection[int] = ()) -> None:
        """Make all chunks readable until `hide`; those without memory read as zeros. No read begins meanwhile.

        but: chunks to leave as they are.
        """
        with self._lock:
            self._moves.make()
            self._exposed = [chunk for chunk in self._states.without_memory() if chunk not in but]
            self._address_space.expose(self._exposed)

    def hide(self) -> None:
        """Undo `expose`."""
        with self._lock:
            exposed, self._exposed = self._exposed, None
            self._address_space.unmap(exposed or ())
            delayed, self._delayed = self._delayed, []
            for loads, run_chunks in delayed:
                self._submit(loads, run_chunks)

    def _await_change(self) -> None:
        """Wait until a reader has changed something, or for a while. The caller holds the lock."""
        self._changed.wait(CHECK_S)
        self._check()

    def _release_there(self) -> int:
        with self._lock:
            self._let_go()
        return 0

    def _let_go(self) -> None:
        """Carry out the releases that `release_soon` noted. The caller holds the lock."""
        if self._leaving:
            leaving = [self._leaving.popleft() for _ in range(len(self._leaving))]
            self._submit(self._states.release(leaving))

    def _submit(self, loads: Sequence[Load], run_chunks: int | None = None) -> None:
        if not loads:
            return
        if self._exposed is not None:
            self._delayed.append((list(loads), run_chunks))
            return
        for run in _coalesce(loads, self._address_space, run_chunks or self._run_chunks):
            job = self._job(run, self._moves.ask(run))
            if not run[0].is_urgent:
                self._patient.update(dict.fromkeys((load.chunk for load in run), job))
            self._readers.submit(job, is_urgent=run[0].is_urgent)

    def _hasten(self, chunks: Iterable[int]) -> None:
        """Make the waiting reads of `chunks` urgent, which were asked for before while nobody waited for them."""
        for job in dict.fromkeys(self._patient[chunk] for chunk in chunks if chunk in self._patient):
            self._readers.hasten(job)

    def _job(self, run: list[Load], ticket: int) -> Callable[[], int]:
        asked = self._asked

        def read() -> int:
            try:
                with self._lock:
                    if not run[0].is_urgent:
                        for load in run:
                            self._patient.pop(load.chunk, None)
                    self._moves.make(ticket)
                    self._moves.check(run)
                    if not self._is_needed(run):
                        self._drop(run)
                        return 0
                n_bytes = self._read(run)
                self._note_loaded(run, n_bytes)
            except Exception as error:  # whatever it is, the consumer must not wait for ever
                self._note_failure(run, asked, as_read_error(error))
                return 0
            return n_bytes

        return read

    def _is_needed(self, run: list[Load]) -> bool:
        """Return whether `run` is still to be read."""
        return True

    def _drop(self, run: list[Load]) -> None:
        self._submit([following for load in run for following in self._states.failed(load.chunk)[1]])
        self._changed.notify_all()

    def _read(self, run: list[Load]) -> int:
        first, last = self._address_space.place(run[0].chunk), self._address_space.place(run[-1].chunk)
        source = self._sources[first.shard]
        n_bytes = source.read_into(first.address, last.address + last.length - first.address, first.file_offset)
        if self._compares:
            chunks = [load.chunk for load in run]
            lengths = (self._address_space.place(chunk).length for chunk in chunks)
            self._sums.compare(source, chunks, first.address, first.file_offset, lengths)
        return n_bytes

    def _note_loaded(self, run: list[Load], n_bytes: int) -> None:
        with self._lock:
            self.read_bytes += n_bytes
            self._submit(self._states.loaded(*[load.chunk for load in run]))
            if not self._states.is_waiting or self._states.is_stuck:
                self._changed.notify_all()

    def _note_failure(self, run: list[Load], asked: int, error: EdgeRunError) -> None:
        logger.info("read of chunk %d (+%d) failed: %s", run[0].chunk, len(run) - 1, error)
        if is_passing := isinstance(error, TierReadError) and error.errno in PASSING:
            with self._lock:  # until nobody waits for them any more, which may be so now
                self._changed.wait_for(lambda: not any(self._states.is_waited_for(load.chunk) for load in run), PAUSE_S)
        with self._lock:
            for load in run:
                has_frame = not self._moves.forget_refused(load.chunk)
                is_wanted, loads = self._states.failed(load.chunk, has_frame)
                self._submit(loads)
                if is_wanted and asked < self._asked:
                    # It was begun for somebody else, or nobody: whoever waits for it now has a try of his own.
                    self._submit(self._states.retry(load.chunk))
                elif is_wanted and is_passing and load.chunk not in self._tried_again:
                    self._tried_again.add(load.chunk)
                    self._submit(self._states.retry(load.chunk))
                elif is_wanted:
                    self._error = error
            self._changed.notify_all()


class WeightsInOrder(Weights[Residency]):
    """Weights that passes use in an order that is known; all but the pinned ones stream."""

    def start(self) -> None:
        """Begin to read ahead."""
        with self._lock:
            self._submit(self._states.pump())

    def pin(self, chunks: Collection[int]) -> None:
        """Pin `chunks` from now on, each in memory of its own."""
        with self._lock:
            self._let_go()
            self._submit(self._states.pin(chunks))

    def unpin(self, chunks: Collection[int]) -> None:
        """Unpin and free `chunks`, which are pinned and not held; they stream again."""
        with self._lock:
            self._let_go()
            while self._states.is_loading(chunks):
                self._await_change()
            self._states.unpin(chunks)
            self._moves.make()  # a frame that is to go elsewhere may still lie there
            self._address_space.unmap(chunks)


class WeightsOnDemand(Weights[OnDemand]):
    """Weights of which it is not known beforehand what comes next; what is held several times is released as often."""

    @property
    def n_frames(self) -> int:
        """The frames that chunks share."""
        return self._states.n_frames

    def hold(self, chunks: Iterable[int], is_guess: bool = False) -> None:
        """Hold `chunks`, which are read while nobody waits for other reads.

        is_guess: read them in small pieces, so that an urgent read need not wait long behind one.
        """
        run_chunks = max(1, GUESS_BYTES // self._address_space.chunk_bytes) if is_guess else self._run_chunks
        with self._lock:
            self._submit(self._states.hold(chunks), run_chunks)

    def unread(self, chunks: Iterable[int]) -> int:
        """Return how many of `chunks` are held, not waited for, and not being read yet."""
        with self._lock:
            return sum(chunk in self._patient for chunk in chunks)

    def grow(self, n_frames: int) -> None:
        """Share `n_frames` frames more among chunks."""
        with self._lock:
            self._let_go()
            self._submit(self._states.grow(n_frames))

    def shrink(self, n_frames: int) -> int:
        """Free the memory of at most `n_frames` frames whose chunks nobody holds.

        Waits for one at least, and returns how many there were.
        """
        with self._lock:
            self._let_go()
            while True:
                n_gone, chunks = self._states.shrink(n_frames)
                self._address_space.unmap(chunks)
                if n_gone or not n_frames:
                    return n_gone
                self._await_change()

    def _is_needed(self, run: list[Load]) -> bool:
        """Return whether any chunk of `run` still has a holder."""
        return any(self._states.is_held(load.chunk) for load in run)


def _coalesce(loads: Sequence[Load], address_space: AddressSpace, most_chunks: int) -> list[list[Load]]:
    """Group loads whose chunks follow each other in memory into reads of at most `most_chunks` chunks, in order.

    Consecutive numbers are not enough: llama.cpp may have unmapped a part of a file that it does not use.
    """
    runs: list[list[Load]] = []
    run: list[Load] = []
    last, was_urgent = -1, False
    for load in loads:
        chunk, _, is_urgent = load
        is_next = run and is_urgent == was_urgent and len(run) < most_chunks
        if is_next and address_space.is_followed_by(last, chunk):
            run.append(load)
        else:
            run = [load]
            runs.append(run)
        last, was_urgent = chunk, is_urgent
    return runs
