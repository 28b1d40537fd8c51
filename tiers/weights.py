"""Weights in memory: carries out the decisions of a `Residency` or `OnDemand` on an `AddressSpace`, with `Readers`.

Frames are moved in the order in which they were handed out, whichever thread comes first, because a frame may be handed
on to the next chunk before it has moved to this one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from edge_run.base.errors import BudgetError, EdgeRunError, TierReadError, option
from edge_run.base.interrupt import CHECK_S, go_on
from edge_run.base.protocols import Clock
from edge_run.base.units import MIB
from edge_run.tiers.address_space import AddressSpace, MoveRefused
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


class Weights:
    """The DRAM tier of one model. One consumer thread acquires and releases; the readers do the rest.

    read_bytes: what they read for it so far.

    It is over 200 lines because the consumer's calls and the readers' jobs change the same queues under one lock.
    """

    def __init__(
        self,
        address_space: AddressSpace,
        sources: Sequence[Source],
        readers: Readers,
        state: Residency | OnDemand,
        clock: Clock = time.monotonic,
        run_chunks: int = MAX_READ_CHUNKS,
        check: Callable[[], None] = go_on,
        *,
        compares: bool = True,
    ) -> None:
        """Manage the chunks of `address_space`.

        sources: the shards, by number.
        readers: the threads that read.
        state: decides which chunks are in memory.
        run_chunks: the most chunks that one read brings.
        check: runs while the consumer waits, and may raise to stop; the chunks being acquired are then not held.
        compares: whether what is read again is compared with what was read first; off where the sources change, or
            where nothing is read twice.
        """
        self._check, self._compares = check, compares
        self._address_space = address_space
        self._sources = sources
        self._readers = readers
        self._residency = state
        self._clock = clock
        self._run_chunks = run_chunks
        self._guess_chunks = max(1, GUESS_BYTES // address_space.chunk_bytes)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._moves: deque[Load] = deque()
        self._leaving: deque[int] = deque()  # released by the consumer, not yet in `_residency`
        self._moved = self._promised = self._asked = self.read_bytes = 0
        self._lost: dict[int, OSError] = {}
        self._sums = ContentSums(address_space.n_chunks)
        self._patient: dict[int, Callable[[], int]] = {}  # queued reads that nobody waits for, by chunk
        self._tried_again: set[int] = set()  # chunks that are waited for, whose read failed once
        self._error: EdgeRunError | None = None
        self._exposed: list[int] | None = None
        self._delayed: list[tuple[list[Load], int | None]] = []

    @property
    def n_frames(self) -> int:
        """The frames that chunks share."""
        return self._residency.n_frames

    def start(self) -> None:
        """Begin to read ahead."""
        with self._lock:
            self._submit(self._residency.pump())

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
                self._submit(self._residency.acquire(chunks))
                if not self._residency.is_waiting:
                    return 0.0
                started = self._clock()
                self._hasten(chunks)
                while self._residency.is_waiting and self._error is None:
                    if self._residency.is_stuck:
                        more = option("memory")
                        raise BudgetError(f"memory budget: too few frames for what one step needs; raise {more}")
                    self._changed.wait(CHECK_S)
                    self._check()
                if self._error is not None:
                    raise self._error
            except BaseException:
                self._submit(self._residency.release(chunks))
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

    def hold(self, chunks: Iterable[int], is_guess: bool = False) -> None:
        """Hold `chunks`, which are read while nobody waits for other reads; only with an `OnDemand`.

        is_guess: read them in small pieces, so that an urgent read need not wait long behind one.
        """
        assert isinstance(self._residency, OnDemand)
        with self._lock:
            self._submit(self._residency.hold(chunks), self._guess_chunks if is_guess else self._run_chunks)

    def pin(self, chunks: Collection[int]) -> None:
        """Pin `chunks` from now on, each in memory of its own; only with a `Residency`."""
        assert isinstance(self._residency, Residency)
        with self._lock:
            self._let_go()
            self._submit(self._residency.pin(chunks))

    def unpin(self, chunks: Collection[int]) -> None:
        """Unpin and free `chunks`, which are pinned and not held; they stream again."""
        assert isinstance(self._residency, Residency)
        with self._lock:
            self._let_go()
            while self._residency.is_loading(chunks):
                self._changed.wait(CHECK_S)
                self._check()
            self._residency.unpin(chunks)
            self._carry_out_moves(self._promised)  # a frame that is to go elsewhere may still lie there
            self._address_space.unmap(chunks)

    def grow(self, n_frames: int) -> None:
        """Share `n_frames` frames more among chunks; only of an `OnDemand`."""
        assert isinstance(self._residency, OnDemand)
        with self._lock:
            self._let_go()
            self._submit(self._residency.grow(n_frames))

    def shrink(self, n_frames: int) -> int:
        """Free the memory of at most `n_frames` frames whose chunks nobody holds; only of an `OnDemand`.

        Waits for one at least, and returns how many there were.
        """
        assert isinstance(self._residency, OnDemand)
        with self._lock:
            self._let_go()
            while True:
                n_gone, chunks = self._residency.shrink(n_frames)
                self._address_space.unmap(chunks)
                if n_gone or not n_frames:
                    return n_gone
                self._changed.wait(CHECK_S)
                self._check()

    def unread(self, chunks: Iterable[int]) -> int:
        """Return how many of `chunks` are held, not waited for, and not being read yet."""
        with self._lock:
            return sum(chunk in self._patient for chunk in chunks)

    def expose(self, but: Collection[int] = ()) -> None:
        """Make all chunks readable until `hide`; those without memory read as zeros. No read begins meanwhile.

        but: chunks to leave as they are.
        """
        with self._lock:
            self._carry_out_moves(self._promised)
            self._exposed = [chunk for chunk in self._residency.without_memory() if chunk not in but]
            self._address_space.expose(self._exposed)

    def hide(self) -> None:
        """Undo `expose`."""
        with self._lock:
            exposed, self._exposed = self._exposed, None
            self._address_space.unmap(exposed or ())
            delayed, self._delayed = self._delayed, []
            for loads, run_chunks in delayed:
                self._submit(loads, run_chunks)

    def _release_there(self) -> int:
        with self._lock:
            self._let_go()
        return 0

    def _let_go(self) -> None:
        """Carry out the releases that `release_soon` noted. The caller holds the lock."""
        if self._leaving:
            leaving = [self._leaving.popleft() for _ in range(len(self._leaving))]
            self._submit(self._residency.release(leaving))

    def _submit(self, loads: Sequence[Load], run_chunks: int | None = None) -> None:
        if not loads:
            return
        if self._exposed is not None:
            self._delayed.append((list(loads), run_chunks))
            return
        for run in _coalesce(loads, self._address_space, run_chunks or self._run_chunks):
            self._moves.extend(run)
            self._promised += len(run)
            job = self._job(run, self._promised)
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
                    self._carry_out_moves(ticket)
                    self._check_frames(run)
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

    def _carry_out_moves(self, ticket: int) -> None:
        """Make all moves up to `ticket`; a move that the kernel refuses is noted for its run."""
        while self._moved < ticket:
            run = [self._moves.popleft()]
            while self._moves and self._goes_with(self._moves[0], run):
                run.append(self._moves.popleft())
            self._moved += len(run)
            try:
                self._address_space.map(run[0].chunk, run[0].source, len(run))
            except OSError as error:
                self._lost.update((load.chunk, error) for load in run)

    def _goes_with(self, load: Load, run: list[Load]) -> bool:
        """Return whether `load` can be moved in one call with `run`: from chunks in a row to chunks in a row."""
        chunk, source, _ = load
        last_chunk, last_source, _ = run[-1]
        if source is None or last_source is None or not self._address_space.is_followed_by(last_chunk, chunk):
            return False
        if source < 0 or last_source < 0:
            return source < 0 and last_source < 0
        first_chunk, first_source, _ = run[0]
        is_apart = first_source is not None and abs(first_source - first_chunk) > len(run)
        return is_apart and self._address_space.is_followed_by(last_source, source)

    def _check_frames(self, run: list[Load]) -> None:
        for load in run if self._lost else ():
            if error := self._lost.get(load.chunk):
                advice = "please report this"
                if not isinstance(error, MoveRefused):
                    advice = f"raise vm.max_map_count or lower {option('memory')}"
                raise TierReadError(f"moving page frames failed ({error}); {advice}") from error

    def _is_needed(self, run: list[Load]) -> bool:
        """Return whether any chunk of `run` still has a holder."""
        state = self._residency
        return not isinstance(state, OnDemand) or any(state.is_held(load.chunk) for load in run)

    def _drop(self, run: list[Load]) -> None:
        self._submit([following for load in run for following in self._residency.failed(load.chunk)[1]])
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
            self._submit(self._residency.loaded(*[load.chunk for load in run]))
            if not self._residency.is_waiting or self._residency.is_stuck:
                self._changed.notify_all()

    def _note_failure(self, run: list[Load], asked: int, error: EdgeRunError) -> None:
        logger.info("read of chunk %d (+%d) failed: %s", run[0].chunk, len(run) - 1, error)
        if is_passing := isinstance(error, TierReadError) and error.errno in PASSING:
            with self._lock:  # until nobody waits for them any more, which may be so now
                self._changed.wait_for(
                    lambda: not any(self._residency.is_waited_for(load.chunk) for load in run), PAUSE_S
                )
        with self._lock:
            for load in run:
                has_frame = self._lost.pop(load.chunk, None) is None
                is_wanted, loads = self._residency.failed(load.chunk, has_frame)
                self._submit(loads)
                if is_wanted and asked < self._asked:
                    # It was begun for somebody else, or nobody: whoever waits for it now has a try of his own.
                    self._submit(self._residency.retry(load.chunk))
                elif is_wanted and is_passing and load.chunk not in self._tried_again:
                    self._tried_again.add(load.chunk)
                    self._submit(self._residency.retry(load.chunk))
                elif is_wanted:
                    self._error = error
            self._changed.notify_all()


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
