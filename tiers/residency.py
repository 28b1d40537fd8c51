"""Which chunks are in memory: a state machine without I/O.

Pinned chunks have memory of their own and never leave. The others stream through a fixed number of frames, in a cyclic
order that is known beforehand, because every pass over a model reads its weights in the same order.

    ABSENT -> LOADING -> FRESH -> HELD -> SPENT -> (its frame moves under another chunk) ABSENT

That is the usual way. A chunk that somebody waits for goes from LOADING to HELD, one whose read fails back to ABSENT; a
HELD or SPENT one that is used again soon becomes FRESH, and a SPENT one that is used at once HELD. One that was read
and is not needed any more is SPENT at once. `pin` makes a chunk PINNED, whatever memory it has, or its read when it
comes; `unpin` takes it from there to ABSENT.

In a cycle, LRU would evict exactly the chunk that is needed next. Here the victim is the chunk that was used last,
whose next use is the farthest (Belady 1966). A chunk that was read ahead is evicted only for one that is needed now.

Pinned chunks are read in the order of use too, as their turn comes. While nothing else is read, as after opening, when
all frames are full and no pass has begun, some are read before that.

The methods take events (`pump`, `acquire`, `release`, `loaded`, `failed`, `retry`, `pin`, `unpin`) and return the
reads to start. There is one consumer. Not thread-safe: the caller locks.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from edge_run.tiers.chunk_states import ChunkState, ChunkStates, Load

_ABSENT, _LOADING, _FRESH, _HELD, _SPENT, _PINNED = map(int, ChunkState)  # which take less time to look up


class Residency(ChunkStates):
    """The state of every chunk under one plan.

    It is over 200 lines because what happens to one chunk decides what may be read of all others.

    n_chunks: how many chunks there are.
    order: the chunks that a pass reads, in order of use; a chunk that is used twice stands in it twice.
    pinned: the chunks that stay.
    n_frames: the frames that all other chunks share.
    most_early: the pinned chunks that may be on their way before their turn.

    The consumer and the frontier (the next use to be read ahead) are counted in uses since the start and never wrap;
    the frontier is at most one pass ahead of the consumer. The chunks used between the two are in memory or on their
    way, unless a read failed. So a released chunk stays in memory if it is used again before the frontier.
    """

    def __init__(
        self, n_chunks: int, order: Sequence[int], pinned: Collection[int], n_frames: int, most_early: int = 0
    ) -> None:
        super().__init__(n_chunks, pinned, n_frames)
        self._order = list(order)
        self._most_early, self._early = most_early, set[int]()
        later = (chunk for chunk in dict.fromkeys(self._order) if chunk in self._own)
        self._later = deque(later if most_early else ())  # each is read early at most once: if that fails, in its turn
        self._first_use = dict(zip(reversed(self._order), range(len(order) - 1, -1, -1), strict=True))
        self._uses: dict[int, list[int]] = {}  # of chunks used more than once: few in most models
        if len(self._first_use) < len(order):
            for i, chunk in enumerate(self._order):
                if (first := self._first_use[chunk]) != i:
                    self._uses.setdefault(chunk, [first]).append(i)
        self._spent: dict[int, None] = {}  # in the order in which they were used
        self._fresh: set[int] = set()
        self._consumer = self._frontier = 0

    def pump(self) -> list[Load]:
        """Return as many reads ahead as there are idle frames, in order of use, past the end of the pass too."""
        loads: list[Load] = []
        if self._starved:
            return loads
        order, states, n = self._order, self._state, len(self._order)
        frontier, limit = max(self._frontier, self._consumer), self._consumer + n
        while frontier < limit:
            chunk = order[frontier % n]
            state = states[chunk]
            if state == _ABSENT:
                if (load := self._start(chunk)) is None:
                    break
                loads.append(load)
            elif state == _SPENT:
                self._set_fresh(chunk)
            elif state == _HELD:
                break
            frontier += 1
        self._frontier = frontier
        return in_a_row(loads) + self._read_early()

    def acquire(self, chunks: Iterable[int]) -> list[Load]:
        """Hold `chunks` until they are released. Return the urgent reads; the caller waits while `is_waiting`.

        A chunk that is used several times before it is released stands in `chunks` as often, in the order of use.
        """
        met: set[int] = set()
        for chunk in chunks:
            state = self._state[chunk]
            if state == _PINNED:
                continue
            if state in (_FRESH, _SPENT):
                self._fresh.discard(chunk)
                self._spent.pop(chunk, None)
                self._state[chunk] = _HELD
            elif state != _HELD and chunk not in met:
                self._wanted.add(chunk)
                if state == _ABSENT:
                    self._starved.append(chunk)
            if chunk in (self._uses if chunk in met else self._first_use):
                self._consumer = self._next_use(chunk) + 1
            met.add(chunk)
        return self._feed()

    def release(self, chunks: Iterable[int]) -> list[Load]:
        """Release `chunks`, whose frames serve the next ones. Return the reads that can start."""
        for chunk in chunks:
            if self._state[chunk] == _HELD:
                self._set_idle(chunk)
            self._wanted.discard(chunk)
        if self._starved:
            self._starved = deque(chunk for chunk in self._starved if chunk in self._wanted)
        return self._feed() + self.pump()

    def loaded(self, *chunks: int) -> list[Load]:
        """Note that the reads of `chunks` are done. Return the reads that waited for a frame."""
        self._n_loading -= len(chunks)
        for chunk in chunks:
            if chunk in self._own:
                self._state[chunk] = _PINNED
            elif chunk in self._wanted:
                self._state[chunk] = _HELD
            else:
                self._set_idle(chunk)
        self._wanted.difference_update(chunks)
        self._early.difference_update(chunks)
        return self._feed() + self._read_early()

    def failed(self, chunk: int, has_frame: bool = True) -> tuple[bool, list[Load]]:
        """As of any chunk; a pinned one that was read early is read again in its turn."""
        self._early.discard(chunk)
        return super().failed(chunk, has_frame)

    def pin(self, chunks: Iterable[int]) -> list[Load]:
        """Pin `chunks` from now on, in memory of their own. Return the reads that can start.

        A chunk that has a frame keeps it as its own; the streaming chunks get a new frame in its place.
        """
        for chunk in chunks:
            state = self._state[chunk]
            if chunk in self._own:
                continue
            self._own.add(chunk)
            if state != _ABSENT or chunk in self._vacant:
                self._n_unmade += 1
            self._vacant.discard(chunk)
            self._fresh.discard(chunk)
            self._spent.pop(chunk, None)
            if state not in (_ABSENT, _LOADING):
                self._state[chunk] = _PINNED
        return self.pump()

    def is_loading(self, chunks: Iterable[int]) -> bool:
        """Return whether any of `chunks` is on its way."""
        return any(self._state[chunk] == _LOADING for chunk in chunks)

    def unpin(self, chunks: Iterable[int]) -> None:
        """Unpin `chunks`, whose reads are done: they have no memory now, and stream from now on."""
        for chunk in chunks:
            assert chunk in self._own, chunk
            assert self._state[chunk] != _LOADING, chunk
            self._own.remove(chunk)
            self._state[chunk] = _ABSENT
        self._frontier = self._consumer

    def check(self) -> None:
        """Raise AssertionError unless every frame is in exactly one place and no state contradicts another."""
        super().check()
        assert self._fresh == {c for c, state in enumerate(self._state) if state == _FRESH}
        assert set(self._spent) == {c for c, state in enumerate(self._state) if state == _SPENT}
        assert all(self._state[c] == _ABSENT for c in self._starved)
        assert len(self._early) <= self._most_early
        assert all(c in self._own and self._state[c] == _LOADING for c in self._early)

    def _read_early(self) -> list[Load]:
        """Return reads of pinned chunks before their turn, where nobody waits and nothing else is read."""
        loads: list[Load] = []
        if not self._later:
            return loads
        is_busy = self._starved or self._wanted or self._n_loading > len(self._early)
        if is_busy or 2 * len(self._early) > self._most_early:  # several at once, as neighbours are read together
            return loads
        while self._later and len(self._early) < self._most_early:
            chunk = self._later.popleft()
            if chunk in self._own and self._state[chunk] == _ABSENT and (load := self._start(chunk)):
                self._early.add(chunk)
                loads.append(load)
        return loads

    def _set_idle(self, chunk: int) -> None:
        """Keep `chunk` in memory when it is used again before the frontier, else free its frame."""
        if self._next_use(chunk) < self._frontier:
            self._set_fresh(chunk)
        else:
            self._state[chunk] = _SPENT
            self._spent[chunk] = None

    def _set_fresh(self, chunk: int) -> None:
        self._spent.pop(chunk, None)
        self._state[chunk] = _FRESH
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

    def _take_frame(self, is_urgent: bool) -> int | None:
        """Take the frame of the chunk used last.

        Where there is none and somebody waits, take that of the chunk whose use is the farthest of those read ahead,
        which is read again later.
        """
        if self._spent:
            victim, _ = self._spent.popitem()
            self._state[victim] = _ABSENT
            return victim
        if not is_urgent or not self._fresh:
            return None
        victim = max(self._fresh, key=self._next_use)
        self._fresh.discard(victim)
        self._state[victim] = _ABSENT
        self._frontier = min(self._frontier, self._next_use(victim))
        return victim

    def _feed(self) -> list[Load]:
        """Return the reads that someone waits for, as far as there are frames."""
        loads: list[Load] = []
        while self._starved and (load := self._start(self._starved[0], is_urgent=True)) is not None:
            self._starved.popleft()
            loads.append(load)
        return in_a_row(loads)


def in_a_row(loads: list[Load]) -> list[Load]:
    """Return `loads` with the same frames, given out in the order of the chunks that they come from.

    They were taken the other way round, as the chunk used last gives up its frame first. Like this frames of neighbours
    go to neighbours, in one move. Frames that one of these very moves would put in another's way are left as they are.
    """
    if len(loads) < 2:
        return loads
    sources = [load.source for load in loads if load.source is not None]
    if len(sources) < len(loads) or not {load.chunk for load in loads}.isdisjoint(sources):
        return loads
    return [Load(load.chunk, source, load.is_urgent) for load, source in zip(loads, sorted(sources), strict=True)]
