"""Weights in memory: carries out what `Residency` decides, on the chunks of a `Territory`, with `Readers`.

Frames are moved in the order in which they were handed out, whichever thread gets there first: a frame that one chunk
gives up may be promised to the next before it has moved.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from edge_run.base.errors import BudgetError, EdgeRunError, TierReadError
from edge_run.base.protocols import Clock
from edge_run.tiers.readers import Readers
from edge_run.tiers.residency import Load, Residency
from edge_run.tiers.source import SourceFile
from edge_run.tiers.territory import Territory

logger = logging.getLogger(__name__)

MAX_READ_CHUNKS = 4


class Weights:
    """The DRAM tier of one model. One consumer thread acquires and releases; the readers do the rest."""

    def __init__(
        self,
        territory: Territory,
        sources: Sequence[SourceFile],
        readers: Readers,
        state: Residency,
        clock: Clock = time.monotonic,
    ) -> None:
        self._territory = territory
        self._sources = sources
        self._readers = readers
        self._residency = state
        self._clock = clock
        self._changed = threading.Condition()
        self._moves: deque[Load] = deque()
        self._moved = self._promised = 0
        self._lost: dict[int, OSError] = {}
        self._error: EdgeRunError | None = None

    def start(self) -> None:
        """Begin to read ahead."""
        with self._changed:
            self._submit(self._residency.pump())

    def acquire(self, chunks: Iterable[int], check: Callable[[], None] = lambda: None) -> float:
        """Hold `chunks`; return the seconds waited until all are readable.

        check runs while waiting and may raise to stop.
        Raises TierReadError or ModelFileError when one cannot be read, BudgetError when there are too few frames for
        all that is held; then nothing more is held than before.
        """
        chunks = list(chunks)
        with self._changed:
            self._error = None
            started = self._clock()
            try:
                self._submit(self._residency.acquire(chunks))
                if not self._residency.is_waiting:
                    return 0.0
                while self._residency.is_waiting and self._error is None:
                    if self._residency.is_stuck:
                        raise BudgetError("memory budget: too few frames for what one step needs; raise --memory")
                    self._changed.wait(timeout=0.1)
                    check()
                if self._error is not None:
                    raise self._error
            except BaseException:
                self._submit(self._residency.release(chunks))
                raise
            return self._clock() - started

    def release(self, chunks: Iterable[int]) -> None:
        """Let `chunks` go and read ahead into their frames."""
        with self._changed:
            self._submit(self._residency.release(chunks))

    def _submit(self, loads: Sequence[Load]) -> None:
        for run in _coalesce(loads, self._territory):
            self._moves.extend(run)
            self._promised += len(run)
            self._readers.submit(self._job(run, self._promised), is_urgent=run[0].is_urgent)

    def _job(self, run: list[Load], ticket: int) -> Callable[[], int]:
        def read() -> int:
            try:
                with self._changed:
                    self._carry_out_moves(ticket)
                    self._check_frames(run)
                n_bytes = self._read(run)
                self._note_loaded(run)
            except EdgeRunError as error:
                self._note_failure(run, error)
                return 0
            except Exception as error:  # a mistake of ours must not leave the consumer waiting for ever
                self._raise_in_consumer(TierReadError(f"a reader thread failed: {error!r}; please report this"))
                raise
            return n_bytes

        return read

    def _carry_out_moves(self, ticket: int) -> None:
        """Make all moves up to `ticket`; note one that the kernel refuses, for the run that it belongs to."""
        while self._moved < ticket:
            load = self._moves.popleft()
            self._moved += 1
            try:
                self._territory.furnish(load.chunk, load.source)
            except OSError as error:
                self._lost[load.chunk] = error

    def _check_frames(self, run: list[Load]) -> None:
        for load in run:
            if error := self._lost.get(load.chunk):
                raise TierReadError(
                    f"moving page frames failed ({error}); raise vm.max_map_count or lower --memory"
                ) from error

    def _read(self, run: list[Load]) -> int:
        first = self._territory.place(run[0].chunk)
        length = sum(self._territory.place(load.chunk).length for load in run)
        return self._sources[first.shard].read_into(first.address, length, first.file_offset)

    def _note_loaded(self, run: list[Load]) -> None:
        with self._changed:
            for load in run:
                self._submit(self._residency.loaded(load.chunk))
            if not self._residency.is_waiting or self._residency.is_stuck:
                self._changed.notify_all()

    def _raise_in_consumer(self, error: EdgeRunError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _note_failure(self, run: list[Load], error: EdgeRunError) -> None:
        logger.info("read of chunk %d (+%d) failed: %s", run[0].chunk, len(run) - 1, error)
        with self._changed:
            for load in run:
                has_frame = self._lost.pop(load.chunk, None) is None
                is_wanted, loads = self._residency.failed(load.chunk, has_frame)
                if is_wanted:
                    self._error = error
                self._submit(loads)
            self._changed.notify_all()


def _coalesce(loads: Sequence[Load], territory: Territory) -> list[list[Load]]:
    """Group chunks that follow each other in memory, in the order given, into reads of at most MAX_READ_CHUNKS chunks.

    Neighbours by number need not be: a mapping may have a hole, where llama.cpp gave back what it does not use.
    """
    runs: list[list[Load]] = []
    for load in loads:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and load.is_urgent == last.is_urgent
            and len(runs[-1]) < MAX_READ_CHUNKS
            and territory.is_followed_by(last.chunk, load.chunk)
        ):
            runs[-1].append(load)
        else:
            runs.append([load])
    return runs
