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

from collections import deque
from collections.abc import Collection, Iterable

from edge_run.tiers.residency import NEW_FRAME, ChunkState, Load


class OnDemand:
    """The state of every chunk.

    n_chunks: how many there are.
    n_frames: the frames that all chunks share, except the fixed ones.
    fixed: the chunks with memory of their own.
    """

    def __init__(self, n_chunks: int, n_frames: int, fixed: Collection[int] = ()) -> None:
        self._fixed = frozenset(fixed)
        self._state = [ChunkState.ABSENT] * n_chunks
        self._holders = [0] * n_chunks
        self._n_frames = self._n_unmade = n_frames
        self._vacant: set[int] = set()
        self._spent: dict[int, None] = {}  # in the order in which they were let go
        self._wanted: set[int] = set()
        self._starved: deque[int] = deque()
        self._queued: deque[int] = deque()
        self._n_loading = 0

    @property
    def is_waiting(self) -> bool:
        """Whether a chunk that was acquired is still on its way."""
        return bool(self._wanted)

    @property
    def is_stuck(self) -> bool:
        """Whether a chunk that was acquired can never come: all frames are held, and no read is in flight."""
        return bool(self._starved) and self._n_loading == 0

    def state(self, chunk: int) -> ChunkState:
        """Return where `chunk` is."""
        return self._state[chunk]

    def is_held(self, chunk: int) -> bool:
        """Return whether `chunk` has a holder, whether it has been read or not."""
        return self._holders[chunk] > 0

    def pump(self) -> list[Load]:
        """Return the reads that can start now, of those that wait for a frame."""
        return self._feed()

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
        for chunk in reversed(list(chunks)):
            self._holders[chunk] -= 1
            self._wanted.discard(chunk)
            if self._holders[chunk] == 0 and self._state[chunk] is ChunkState.HELD:
                self._set_spent(chunk)
        return self._feed()

    def loaded(self, chunk: int) -> list[Load]:
        """Note that a read is done. Return the reads that waited for a frame."""
        self._n_loading -= 1
        self._wanted.discard(chunk)
        if self._holders[chunk]:
            self._state[chunk] = ChunkState.HELD
        else:
            self._set_spent(chunk)
        return self._feed()

    def failed(self, chunk: int, has_frame: bool = True) -> tuple[bool, list[Load]]:
        """Note that a read failed or was not made, so that the chunk is absent.

        has_frame: whether the frame is still there; a move that fails loses it.

        Returns whether someone waits for the chunk, and the reads that waited for a frame. The holders of the chunk
        still count: it is read when it is acquired again.
        """
        self._n_loading -= 1
        self._state[chunk] = ChunkState.ABSENT
        if chunk not in self._fixed:
            if has_frame:
                self._vacant.add(chunk)
            else:
                self._n_unmade += 1
        is_wanted = chunk in self._wanted
        self._wanted.discard(chunk)
        return is_wanted, self._feed()

    def retry(self, chunk: int) -> list[Load]:
        """Wait again for `chunk`, which is held and whose read failed. Return the reads to start."""
        self._wanted.add(chunk)
        self._starved.append(chunk)
        return self._feed()

    def without_memory(self) -> list[int]:
        """Return the chunks that have no memory once all moves are made, and those that will get new memory."""
        absent = (chunk for chunk, state in enumerate(self._state) if state is ChunkState.ABSENT)
        return [chunk for chunk in absent if chunk not in self._vacant]

    def check(self) -> None:
        """Raise AssertionError unless every frame is in exactly one place and no state contradicts another."""
        present = {c for c, state in enumerate(self._state) if state is not ChunkState.ABSENT}
        framed = present - self._fixed
        n_free = self._n_unmade + len(self._vacant)
        assert len(framed) + n_free == self._n_frames, (len(framed), n_free, self._n_frames)
        assert not framed & self._vacant, "a frame is free and in use"
        assert not self._fixed & self._vacant, "memory of a chunk's own is free for others"
        assert set(self._spent) == {c for c in framed if self._state[c] is ChunkState.SPENT}
        assert all(self._holders[c] == 0 for c in self._spent)
        assert all(self._holders[c] > 0 for c in present if self._state[c] is ChunkState.HELD)
        assert self._n_loading == sum(state is ChunkState.LOADING for state in self._state)
        assert all(self._state[c] in (ChunkState.ABSENT, ChunkState.LOADING) for c in self._wanted)
        assert min(self._holders, default=0) >= 0, "a chunk was released more often than it was held"

    def _add_holders(self, chunks: Iterable[int], absent: deque[int]) -> None:
        """Count one holder more; those that are not there join `absent`, to be read when there is a frame."""
        for chunk in chunks:
            self._holders[chunk] += 1
            state = self._state[chunk]
            if state is ChunkState.HELD:
                continue
            if state is ChunkState.SPENT:
                self._spent.pop(chunk, None)
                self._state[chunk] = ChunkState.HELD
                continue
            if absent is self._starved:
                self._wanted.add(chunk)
            if state is ChunkState.ABSENT:
                absent.append(chunk)

    def _set_spent(self, chunk: int) -> None:
        self._state[chunk] = ChunkState.SPENT
        if chunk not in self._fixed:
            self._spent[chunk] = None

    def _feed(self) -> list[Load]:
        """Start the reads that were asked for, first those that someone waits for, as far as there are frames."""
        loads: list[Load] = []
        for asked in (self._starved, self._queued):
            while asked:
                chunk = asked[0]
                is_needed = chunk in self._wanted if asked is self._starved else self._holders[chunk] > 0
                if is_needed and self._state[chunk] is ChunkState.ABSENT:
                    source = None
                    if chunk not in self._fixed and (source := self._take_frame(chunk)) is None:
                        return loads
                    self._state[chunk] = ChunkState.LOADING
                    self._n_loading += 1
                    loads.append(Load(chunk, source, is_urgent=chunk in self._wanted))
                asked.popleft()
        return loads

    def _take_frame(self, chunk: int) -> int | None:
        """Return a frame for `chunk`: the one that is under it since a read failed, or any that nobody holds."""
        if chunk in self._vacant:
            self._vacant.remove(chunk)
            return chunk
        if self._n_unmade:
            self._n_unmade -= 1
            return NEW_FRAME
        if self._vacant:
            return self._vacant.pop()
        if not self._spent:
            return None
        victim, _ = self._spent.popitem()
        self._state[victim] = ChunkState.ABSENT
        return victim
