"""Which of several drives that hold the same bytes is read from next: a state machine without I/O.

A read goes to the drive that is expected to be done with it first, by the bandwidth that was measured so far and by
what is on its way there. A drive that fails rests, each time for twice as long, and so does one after it has hung;
while a read hangs there, nothing else is read from it. A drive that is too slow to be chosen is tried now and then.

The methods take events (`begin`, `end`, `fail`, `hang`, `revive`). Not thread-safe: the caller locks.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from edge_run.base.protocols import Clock
from edge_run.base.units import KIB, MIB

MEASURED_BYTES = 256 * KIB  # a shorter read takes as long as the drive takes to begin, and says nothing about bandwidth
UNMEASURED_BYTES_PER_S = 1e6  # what is expected where nothing was measured: little, so that no slow drive seems to hang
MEMORY_BYTES = 64 * MIB  # after so many a measurement counts half
LEAST_REST_S, MOST_REST_S = 1.0, 60.0
LEAST_PATIENCE_S, PATIENCE = 2.0, 8.0  # more than that, and so many times what a read is expected to take, is a hang
START_S = 15.0  # the least before anything was measured: a drive in standby takes so long to start
OUTDATED = 1e-3  # what a measurement counts of a drive that was not read from for long
RETRY_S, RETRY = 0.5, 30.0  # a slow drive is tried after so long, and after so many times what a read takes there


@dataclass(slots=True)
class _Drive:
    """What is known of a drive. n_bytes over busy_s is its bandwidth, with what is long ago worth less."""

    begun_s: float  # when it last began to be busy with long reads, or what was read was last counted
    ended_s: float
    n_reads: int = 0
    n_long_reads: int = 0
    n_hanging: int = 0
    flying_bytes: int = 0
    n_bytes: float = 0.0
    busy_s: float = 0.0
    rest_s: float = 0.0
    rests_until_s: float = -math.inf


class Stripes:
    """The state of `n_drives` drives. Drives are numbers."""

    def __init__(self, n_drives: int, clock: Clock) -> None:
        self._clock = clock
        self._drives = [_Drive(clock(), clock()) for _ in range(n_drives)]

    def bandwidth(self, drive: int) -> float:
        """Return the bytes a second that were measured; of a drive that was not yet, those of the fastest one.

        Where none was measured, UNMEASURED_BYTES_PER_S.
        """
        known = [one.n_bytes / one.busy_s if one.busy_s > 0 else 0.0 for one in self._drives]
        return known[drive] or max(known) or UNMEASURED_BYTES_PER_S

    def is_answering(self, drive: int) -> bool:
        """Return whether no read hangs at `drive`."""
        return not self._drives[drive].n_hanging

    def begin(self, length: int, failed: Collection[int] = ()) -> int | None:
        """Return the drive for a read of `length` bytes, which has begun then; None where it `failed` on all of them.

        A drive that rests is read from where nothing else answers, and one where a read hangs where nothing else is.
        """
        now_s = self._clock()
        left = [drive for drive in range(len(self._drives)) if drive not in failed]
        answering = [drive for drive in left if self.is_answering(drive)]
        ready = [drive for drive in left if self._is_ready(drive, now_s)] or answering or left
        if not ready:
            return None
        chosen = min(ready, key=lambda drive: self._expected_s(drive, length))
        for drive in ready:
            if self._is_forgotten(drive, length, now_s):
                chosen, state = drive, self._drives[drive]
                state.n_bytes, state.busy_s = OUTDATED * state.n_bytes, OUTDATED * state.busy_s
                break
        state = self._drives[chosen]
        if not state.n_long_reads:
            state.begun_s = now_s
        state.n_reads += 1
        state.n_long_reads += length >= MEASURED_BYTES
        state.flying_bytes += length
        return chosen

    def patience_s(self, drive: int) -> float:
        """Return how long a read that has begun may take before it counts as hanging."""
        least_s = LEAST_PATIENCE_S if any(one.busy_s > 0 for one in self._drives) else START_S
        return least_s + PATIENCE * self._drives[drive].flying_bytes / self.bandwidth(drive)

    def end(self, drive: int, length: int) -> None:
        """Note that a read of `length` bytes was done."""
        state = self._drives[drive]
        if length >= MEASURED_BYTES:
            share = 0.5 ** (length / MEMORY_BYTES)
            state.n_bytes, state.busy_s = state.n_bytes * share + length, state.busy_s * share
            self._count(state)
        state.rest_s, state.ended_s = 0.0, self._clock()
        self._leave(state, length)

    def fail(self, drive: int, length: int) -> None:
        """Note that a read failed."""
        state = self._drives[drive]
        self._count(state)
        self._leave(state, length)
        self._rest(state)

    def hang(self, drive: int) -> None:
        """Note that a read takes too long; it goes on until `revive`. What was measured is no measure any more."""
        self._drives[drive].n_hanging += 1

    def revive(self, drive: int, length: int) -> None:
        """Note that a read that hung has ended, whatever came of it."""
        state = self._drives[drive]
        state.n_hanging -= 1
        state.n_bytes = state.busy_s = 0.0
        state.begun_s = self._clock()
        self._leave(state, length)
        self._rest(state)

    def _is_ready(self, drive: int, now_s: float) -> bool:
        return self.is_answering(drive) and now_s >= self._drives[drive].rests_until_s

    def _expected_s(self, drive: int, length: int) -> float:
        return (self._drives[drive].flying_bytes + length) / self.bandwidth(drive)

    def _is_forgotten(self, drive: int, length: int, now_s: float) -> bool:
        state = self._drives[drive]
        return not state.n_reads and now_s - state.ended_s > max(RETRY_S, RETRY * length / self.bandwidth(drive))

    def _count(self, state: _Drive) -> None:
        if state.n_long_reads:
            now_s = self._clock()
            state.busy_s += now_s - state.begun_s
            state.begun_s = now_s

    @staticmethod
    def _leave(state: _Drive, length: int) -> None:
        state.n_reads -= 1
        state.n_long_reads -= length >= MEASURED_BYTES
        state.flying_bytes -= length

    def _rest(self, state: _Drive) -> None:
        state.ended_s = self._clock()
        # What fails while it rests was read before, or because nothing else is left.
        if state.ended_s >= state.rests_until_s:
            state.rest_s = min(MOST_REST_S, max(LEAST_REST_S, 2 * state.rest_s))
            state.rests_until_s = state.ended_s + state.rest_s
