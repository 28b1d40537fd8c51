"""Which chunks are in memory: a state machine without I/O.

A chunk is a fixed-size piece of a model file, known by its number. Pinned chunks have memory of their own and never
leave. The others stream through a fixed number of frames, in a cyclic order that is known beforehand, because every
pass over a model reads its weights in the same order. A frame is named by the chunk that it holds, or by a negative
number before it is made.

    ABSENT -> LOADING -> FRESH -> HELD -> SPENT -> (its frame moves under another chunk) ABSENT

That is the usual way. A chunk that somebody waits for goes from LOADING to HELD, one whose read fails back to ABSENT; a
HELD or SPENT one that is used again soon becomes FRESH, and a SPENT one that is used at once HELD.

In a cycle, LRU would evict exactly the chunk that is needed next. Here the victim is the chunk that was used last,
whose next use is the farthest (Belady 1966). A chunk that was read ahead is evicted only for one that is needed now.

The methods take events (`pump`, `acquire`, `release`, `loaded`, `failed`, `retry`, `pin`, `unpin`) and return the
reads to start. There is one consumer. Not thread-safe: the caller locks.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

NEW_FRAME = -1


class ChunkState(Enum):
    """The state of a chunk. A frame has none of its own: it is not made yet, free, or under a chunk.

    ABSENT: not in memory. No frame is under it, but for one that is left since a read failed.
    LOADING: a frame is under it, and its read is under way.
    FRESH: in memory, and used again before the next read ahead of need; so it stays.
    HELD: in use by the pass.
    SPENT: in memory, and used last; its frame is the next to be taken.
    PINNED: in memory of its own, for as long as it is pinned.
    """

    ABSENT = 0
    LOADING = 1
    FRESH = 2
    HELD = 3
    SPENT = 4
    PINNED = 5


class Load(NamedTuple):
    """An instruction to read a chunk.

    chunk: the chunk.
    source: where its memory comes from: None for memory of its own, a negative number for a new frame, else the chunk
        whose frame moves.
    is_urgent: whether somebody waits for it.
    """

    chunk: int
    source: int | None
    is_urgent: bool = False


class Residency:
    """The state of every chunk under one plan.

    n_chunks: how many chunks there are.
    order: the chunks that a pass reads, in order of use; a chunk that is used twice stands in it twice.
    pinned: the chunks that stay.
    n_frames: the frames that all other chunks share.

    The consumer and the frontier (the next use to be read ahead) are counted in uses since the start and never wrap;
    the frontier is at most one pass ahead of the consumer. The chunks used between the two are in memory or on their
    way, unless a read failed. So a released chunk stays in memory if it is used again before the frontier.

    It is over 200 lines because every event changes the same few tables, which two classes would have to share.
    """

    def __init__(self, n_chunks: int, order: Sequence[int], pinned: Iterable[int], n_frames: int) -> None:
        self._state = [ChunkState.ABSENT] * n_chunks
        self._order = list(order)
        self._first_use = dict(zip(reversed(self._order), range(len(order) - 1, -1, -1), strict=True))
        self._uses: dict[int, list[int]] = {}  # of chunks used more than once: few in most models
        if len(self._first_use) < len(order):
            for i, chunk in enumerate(self._order):
                if (first := self._first_use[chunk]) != i:
                    self._uses.setdefault(chunk, [first]).append(i)
        self._pinned = set(pinned)
        self._n_frames = n_frames
        self._n_unmade = n_frames
        self._vacant: set[int] = set()
        self._spent: list[int] = []
        self._fresh: set[int] = set()
        self._wanted: set[int] = set()
        self._starved: list[int] = []
        self._n_loading = 0
        self._consumer = self._frontier = 0

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

    def pump(self) -> list[Load]:
        """Return as many reads ahead as there are idle frames, in order of use, past the end of the pass too."""
        loads: list[Load] = []
        if self._starved:
            return loads
        self._frontier = max(self._frontier, self._consumer)
        while self._frontier < self._consumer + len(self._order):
            chunk = self._order[self._frontier % len(self._order)]
            state = self._state[chunk]
            if state is ChunkState.ABSENT:
                source = None
                if chunk not in self._pinned and (source := self._take_idle_frame(chunk)) is None:
                    break
                loads.append(self._start(chunk, source))
            elif state is ChunkState.SPENT:
                self._set_fresh(chunk)
            elif state is ChunkState.HELD:
                break
            self._frontier += 1
        return loads

    def acquire(self, chunks: Iterable[int]) -> list[Load]:
        """Hold `chunks` until they are released. Return the urgent reads; the caller waits while `is_waiting`.

        A chunk that is used several times before it is released stands in `chunks` as often, in the order of use.
        """
        met: set[int] = set()
        for chunk in chunks:
            state = self._state[chunk]
            if state is ChunkState.PINNED:
                continue
            if state in (ChunkState.FRESH, ChunkState.SPENT):
                self._fresh.discard(chunk)
                self._state[chunk] = ChunkState.HELD
            elif state is not ChunkState.HELD and chunk not in met:
                self._wanted.add(chunk)
                if state is ChunkState.ABSENT:
                    self._starved.append(chunk)
            if chunk in (self._uses if chunk in met else self._first_use):
                self._consumer = self._next_use(chunk) + 1
            met.add(chunk)
        return self._feed_starved()

    def release(self, chunks: Iterable[int]) -> list[Load]:
        """Release `chunks`, whose frames serve the next ones. Return the reads that can start."""
        for chunk in chunks:
            if self._state[chunk] is ChunkState.HELD:
                self._set_idle(chunk)
            self._wanted.discard(chunk)
        self._starved = [chunk for chunk in self._starved if chunk in self._wanted]
        return self._feed_starved() + self.pump()

    def loaded(self, chunk: int) -> list[Load]:
        """Note that a read is done. Return the reads that waited for a frame."""
        self._n_loading -= 1
        if chunk in self._pinned:
            self._state[chunk] = ChunkState.PINNED
        elif chunk in self._wanted:
            self._state[chunk] = ChunkState.HELD
        else:
            self._set_idle(chunk)
        self._wanted.discard(chunk)
        return self._feed_starved()

    def failed(self, chunk: int, has_frame: bool = True) -> tuple[bool, list[Load]]:
        """Note that a read failed, so that the chunk is absent.

        has_frame: whether the frame is still there; a move that fails loses it, and it is made anew.

        Returns whether someone waits for the chunk, and the reads that waited for a frame.
        """
        self._n_loading -= 1
        self._state[chunk] = ChunkState.ABSENT
        if chunk not in self._pinned:
            if has_frame:
                self._vacant.add(chunk)
            else:
                self._n_unmade += 1
        is_wanted = chunk in self._wanted
        self._wanted.discard(chunk)
        return is_wanted, self._feed_starved()

    def retry(self, chunk: int) -> list[Load]:
        """Wait again for `chunk`, which was acquired and whose read failed. Return the reads to start."""
        self._wanted.add(chunk)
        self._starved.append(chunk)
        return self._feed_starved()

    def pin(self, chunks: Iterable[int]) -> list[Load]:
        """Pin `chunks` from now on, in memory of their own. Return the reads that can start.

        A chunk that has a frame keeps it as its own; the streaming chunks get a new frame in its place.
        """
        for chunk in chunks:
            state = self._state[chunk]
            if chunk in self._pinned:
                continue
            self._pinned.add(chunk)
            if state is not ChunkState.ABSENT or chunk in self._vacant:
                self._n_unmade += 1
            self._vacant.discard(chunk)
            self._fresh.discard(chunk)
            if state not in (ChunkState.ABSENT, ChunkState.LOADING):
                self._state[chunk] = ChunkState.PINNED
        return self.pump()

    def is_loading(self, chunks: Iterable[int]) -> bool:
        """Return whether any of `chunks` is on its way."""
        return any(self._state[chunk] is ChunkState.LOADING for chunk in chunks)

    def unpin(self, chunks: Iterable[int]) -> None:
        """Unpin `chunks`, whose reads are done: they have no memory now, and stream from now on."""
        for chunk in chunks:
            assert chunk in self._pinned, chunk
            assert self._state[chunk] is not ChunkState.LOADING, chunk
            self._pinned.remove(chunk)
            self._state[chunk] = ChunkState.ABSENT
        self._frontier = self._consumer

    def without_memory(self) -> list[int]:
        """Return the chunks that have no memory once all moves are made, and those that will get new memory."""
        absent = (chunk for chunk, state in enumerate(self._state) if state is ChunkState.ABSENT)
        return [chunk for chunk in absent if chunk not in self._vacant]

    def check(self) -> None:
        """Raise AssertionError unless every frame is in exactly one place and no state contradicts another."""
        framed = [c for c, state in enumerate(self._state) if c not in self._pinned and state is not ChunkState.ABSENT]
        n_free = self._n_unmade + len(self._vacant)
        assert len(framed) + n_free == self._n_frames, (len(framed), n_free, self._n_frames)
        assert not set(framed) & self._vacant, "a frame is free and in use"
        assert self._fresh == {c for c, state in enumerate(self._state) if state is ChunkState.FRESH}
        assert {c for c, state in enumerate(self._state) if state is ChunkState.SPENT} <= set(self._spent)
        assert self._n_loading == sum(state is ChunkState.LOADING for state in self._state)
        assert all(self._state[c] in (ChunkState.ABSENT, ChunkState.LOADING) for c in self._wanted)
        assert all(self._state[c] is ChunkState.ABSENT for c in self._starved)

    def _start(self, chunk: int, source: int | None, is_urgent: bool = False) -> Load:
        self._state[chunk] = ChunkState.LOADING
        self._n_loading += 1
        return Load(chunk, source, is_urgent)

    def _set_idle(self, chunk: int) -> None:
        """Keep `chunk` in memory when it is used again before the frontier, else free its frame."""
        if self._next_use(chunk) < self._frontier:
            self._set_fresh(chunk)
        else:
            self._state[chunk] = ChunkState.SPENT
            self._spent.append(chunk)

    def _set_fresh(self, chunk: int) -> None:
        self._state[chunk] = ChunkState.FRESH
        self._fresh.add(chunk)

    def _next_use(self, chunk: int) -> int:
        """Return the first use of `chunk` at or after the consumer; `sys.maxsize` for one that the order lacks."""
        first, n = self._first_use.get(chunk), len(self._order)
        if first is None:
            return sys.maxsize
        lap, here = divmod(self._consumer, n)
        if first >= here:
            return lap * n + first
        uses = self._uses.get(chunk, ())
        i = bisect_left(uses, here)
        return lap * n + uses[i] if i < len(uses) else (lap + 1) * n + first

    def _take_idle_frame(self, chunk: int) -> int | None:
        """Return a frame for `chunk`: its own, if a failed read left it one, or any idle one."""
        if chunk in self._vacant:
            self._vacant.remove(chunk)
            return chunk
        if self._n_unmade:
            self._n_unmade -= 1
            return NEW_FRAME
        if self._vacant:
            return self._vacant.pop()
        while self._spent:
            victim = self._spent.pop()
            if self._state[victim] is ChunkState.SPENT:
                self._state[victim] = ChunkState.ABSENT
                return victim
        return None

    def _take_fresh_frame(self) -> int | None:
        """Take the frame of the chunk whose use is the farthest of those read ahead; the chunk is read again later."""
        if not self._fresh:
            return None
        victim = max(self._fresh, key=self._next_use)
        self._fresh.discard(victim)
        self._state[victim] = ChunkState.ABSENT
        self._frontier = min(self._frontier, self._next_use(victim))
        return victim

    def _feed_starved(self) -> list[Load]:
        """Return the reads that someone waits for, as far as there are frames."""
        loads: list[Load] = []
        while self._starved:
            chunk = self._starved[0]
            source: int | None = None
            if chunk not in self._pinned:
                source = self._take_idle_frame(chunk)
                if source is None:
                    source = self._take_fresh_frame()
                if source is None:
                    break
            loads.append(self._start(self._starved.pop(0), source, is_urgent=True))
        return loads
