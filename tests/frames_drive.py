"""Whole passes over a `Residency`, without readers or memory: reads end when the test says so."""

from __future__ import annotations

from collections.abc import Sequence

from edge_run.prefetch.schedule import Segment
from edge_run.tiers.chunk_states import ChunkState, Load
from edge_run.tiers.residency import Residency


class Drive:
    """Passes from end to end, with a queue of reads in the order of `Readers`: urgent ones in front."""

    def __init__(self, n_chunks: int, schedule: Sequence[Segment], pinned: Sequence[int], n_frames: int) -> None:
        self.schedule = schedule
        order = [chunk for segment in schedule for chunk in segment.acquire]
        self.residency = Residency(n_chunks, order, pinned, n_frames)
        self.queue: list[Load] = []
        self.untouched: set[int] = set()
        self.n_reads = self.n_in_vain = 0
        self._queue(self.residency.pump())

    def run_pass(self, eagerness: Sequence[int]) -> tuple[int, int]:
        """Compute a pass while readers end `eagerness[i]` reads in segment i; return reads, and those made in vain."""
        before = self.n_reads, self.n_in_vain
        for i, segment in enumerate(self.schedule):
            self._queue(self.residency.acquire(segment.acquire))
            while self.residency.is_waiting:
                assert self.queue, "deadlock: a wait, and no read under way"
                self._end_a_read()
            assert all(self.residency.state(c) in (ChunkState.HELD, ChunkState.PINNED) for c in segment.needs)
            self.untouched.difference_update(segment.needs)
            for _ in range(min(eagerness[i % len(eagerness)], len(self.queue))):
                self._end_a_read()
            self._queue(self.residency.release(segment.release))
            self.residency.check()
        return self.n_reads - before[0], self.n_in_vain - before[1]

    def _queue(self, loads: Sequence[Load]) -> None:
        for load in loads:
            if load.source is not None and load.source != load.chunk and load.source in self.untouched:
                self.n_in_vain += 1
                self.untouched.remove(load.source)
            self.queue.insert(0 if load.is_urgent else len(self.queue), load)

    def _end_a_read(self) -> None:
        load = self.queue.pop(0)
        self.n_reads += 1
        self.untouched.add(load.chunk)
        self._queue(self.residency.loaded(load.chunk))
