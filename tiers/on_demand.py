"""Which chunks are in memory when the order of use is not known beforehand: a state machine without I/O.

Each holder of a chunk is counted: a pass that computes with it, a cache that keeps it. A chunk without holders stays in
memory until its frame is needed for another one. The frame of the chunk released last is taken first: layers are
computed one after the other, so that chunk is needed again the latest.

    ABSENT -> LOADING -> HELD -> SPENT -> (its frame moves under another chunk) ABSENT

Chunks that cannot change frames (those that stick out of a mapping) have memory of their own: no frame is moved to
them or from them, whether they are held, released, or their reads fail.

The methods take events (`hold`, `acquire`, `release`, `loaded`, `failed`) and return the reads to start, as in
`tiers/residency.py`, where the order is known. There is one consumer. Not thread-safe: the caller locks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterable

from edge_run.tiers.chunk_states import ChunkState, ChunkStates, Load


class OnDemand(ChunkStates):
    """The state of every chunk.

    n_chunks: how many there are.
    n_frames: the frames that all chunks share, except the fixed ones.
    fixed: the chunks with memory of their own.
    """

    def __init__(self, n_chunks: int, n_frames: int, fixed: Collection[int] = ()) -> None:
        super().__init__(n_chunks, fixed, n_frames)
        self._holders = array("H", bytes(2 * n_chunks))
        self._spent: dict[int, None] = {}  # in the order in which they were let go
        self._queued: deque[int] = deque()

    def is_held(self, chunk: int) -> bool:
        """Return whether `chunk` has a holder, whether it has been read or not."""
        return self._holders[chunk] > 0

    def hold(self, chunks: Iterable[int]) -> list[Load]:
        """Count one more holder of each of `chunks`. Return the reads to start; nobody waits for them yet."""
        self._add_holders(chunks, self._queued)
        return self._feed()

    def acquire(self, chunks: Iterable[int]) -> list[Load]:
        """Count one more holder of each of `chunks`. Return the reads to start; the caller waits while `is_waiting`."""
        self._add_holders(chunks, self._starved)
        return self._feed()

    def release(self, chunks: Iterable[int]) -> list[Load]:
        """Count one holder less of each of `chunks`. Return the reads that can start.

        The frames of neighbours are handed out in the order of the chunks, so that they can be moved together.
        """
        state, wanted, holders, held = self._state, self._wanted, self._holders, ChunkState.HELD
        chunks = list(chunks)
        if wanted:
            wanted.difference_update(chunks)
        for chunk in reversed(chunks):
            holders[chunk] -= 1
            if not holders[chunk] and state[chunk] == held:
                self._set_spent(chunk)
        return self._feed()

    def loaded(self, *chunks: int) -> list[Load]:
        """Note that the reads of `chunks` are done. Return the reads that waited for a frame."""
        self._n_loading -= len(chunks)
        self._wanted.difference_update(chunks)
        for chunk in chunks:
            if self._holders[chunk]:
                self._state[chunk] = ChunkState.HELD
            else:
                self._set_spent(chunk)
        return self._feed()

    def grow(self, n_frames: int) -> list[Load]:
        """Share `n_frames` frames more. Return the reads that waited for a frame."""
        self._n_frames += n_frames
        self._n_unmade += n_frames
        return self._feed()

    def shrink(self, n_frames: int) -> tuple[int, list[int]]:
        """Share `n_frames` frames less, as far as so many hold nothing that anybody holds.

        Return how many those are, and the chunks under which they lie, whose memory is to be given back: it is nobody's
        any more.
        """
        unmade = min(n_frames, self._n_unmade)
        self._n_unmade -= unmade
        left: list[int] = []
        while self._vacant and unmade + len(left) < n_frames:
            left.append(self._vacant.pop())
        while self._spent and unmade + len(left) < n_frames:
            oldest = next(iter(self._spent))
            del self._spent[oldest]
            self._state[oldest] = ChunkState.ABSENT
            left.append(oldest)
        self._n_frames -= unmade + len(left)
        return unmade + len(left), left

    def check(self) -> None:
        """Raise AssertionError unless every frame is in exactly one place and no state contradicts another."""
        super().check()
        present = {c for c, state in enumerate(self._state) if state != ChunkState.ABSENT}
        assert set(self._spent) == {c for c in present - self._own if self._state[c] == ChunkState.SPENT}
        assert all(self._holders[c] == 0 for c in self._spent)
        assert all(self._holders[c] > 0 for c in present if self._state[c] == ChunkState.HELD)
        assert min(self._holders, default=0) >= 0, "a chunk was released more often than it was held"

    def _add_holders(self, chunks: Iterable[int], absent: deque[int]) -> None:
        """Count one holder more; those that are not there join `absent`, to be read when there is a frame."""
        states, holders, held, spent = self._state, self._holders, ChunkState.HELD, ChunkState.SPENT
        for chunk in chunks:
            holders[chunk] += 1
            state = states[chunk]
            if state == held:
                continue
            if state == spent:
                self._spent.pop(chunk, None)
                states[chunk] = held
                continue
            if absent is self._starved:
                self._wanted.add(chunk)
            if state == ChunkState.ABSENT:
                absent.append(chunk)

    def _set_spent(self, chunk: int) -> None:
        self._state[chunk] = ChunkState.SPENT
        if chunk not in self._own:
            self._spent[chunk] = None

    def _feed(self) -> list[Load]:
        """Start the reads that were asked for, first those that someone waits for, as far as there are frames."""
        if not (self._starved or self._queued):
            return []
        loads: list[Load] = []
        state, wanted, holders, is_absent = self._state, self._wanted, self._holders, ChunkState.ABSENT
        for asked in (self._starved, self._queued):
            while asked:
                chunk = asked[0]
                is_wanted = chunk in wanted
                is_needed = is_wanted or (asked is self._queued and holders[chunk])
                if is_needed and state[chunk] == is_absent:
                    if (load := self._start(chunk, is_wanted)) is None:
                        return loads
                    loads.append(load)
                asked.popleft()
        return loads

    def _take_frame(self, is_urgent: bool) -> int | None:
        if not self._spent:
            return None
        victim, _ = self._spent.popitem()
        self._state[victim] = ChunkState.ABSENT
        return victim
