"""What every state machine of chunks has, whether the order of their use is known or not: states and frames.

A chunk is a fixed-size piece of a model file, known by its number. Some have memory of their own; the others share a
number of frames. A frame is named by the chunk that it holds, or by a negative number before it is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

NEW_FRAME = -1


class ChunkState(IntEnum):
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


class ChunkStates(ABC):
    """The state of every chunk, and the frames that are under none.

    n_chunks: how many chunks there are.
    own: the chunks with memory of their own.
    n_frames: the frames that all other chunks share.
    """

    def __init__(self, n_chunks: int, own: Collection[int], n_frames: int) -> None:
        self._state = bytearray(n_chunks)  # all are absent; there may be millions
        self._own = set(own)
        self._n_frames = self._n_unmade = n_frames
        self._vacant: set[int] = set()  # frames under chunks whose reads failed
        self._wanted: set[int] = set()
        self._starved: deque[int] = deque()  # chunks that someone waits for until there is a frame
        self._n_loading = 0

    @property
    def is_waiting(self) -> bool:
        """Whether a chunk that was acquired is still on its way."""
        return bool(self._wanted)

    @property
    def is_stuck(self) -> bool:
        """Whether a chunk that was acquired can never come: all frames are held, and no read is in flight."""
        return bool(self._starved) and self._n_loading == 0

    @property
    def n_frames(self) -> int:
        """The frames that all chunks share, but those with memory of their own."""
        return self._n_frames

    def state(self, chunk: int) -> ChunkState:
        """Return where `chunk` is."""
        return ChunkState(self._state[chunk])

    def failed(self, chunk: int, has_frame: bool = True) -> tuple[bool, list[Load]]:
        """Note that a read failed or was not made, so that the chunk is absent.

        has_frame: whether the frame is still there; a move that fails loses it, and it is made anew.

        Returns whether someone waits for the chunk, and the reads that waited for a frame. Who holds the chunk still
        does: it is read when it is acquired again.
        """
        self._n_loading -= 1
        self._state[chunk] = ChunkState.ABSENT
        if chunk not in self._own:
            if has_frame:
                self._vacant.add(chunk)
            else:
                self._n_unmade += 1
        is_wanted = chunk in self._wanted
        self._wanted.discard(chunk)
        return is_wanted, self._feed()

    def is_waited_for(self, chunk: int) -> bool:
        """Return whether someone waits for the chunk."""
        return chunk in self._wanted

    def retry(self, chunk: int) -> list[Load]:
        """Wait again for `chunk`, which was acquired and whose read failed. Return the reads to start."""
        self._wanted.add(chunk)
        self._starved.append(chunk)
        return self._feed()

    def without_memory(self) -> list[int]:
        """Return the chunks that have no memory once all moves are made, and those that will get new memory."""
        absent = (chunk for chunk, state in enumerate(self._state) if state == ChunkState.ABSENT)
        return [chunk for chunk in absent if chunk not in self._vacant]

    def check(self) -> None:
        """Raise AssertionError unless every frame is in exactly one place and no state contradicts another."""
        framed = {c for c, state in enumerate(self._state) if c not in self._own and state != ChunkState.ABSENT}
        n_free = self._n_unmade + len(self._vacant)
        assert len(framed) + n_free == self._n_frames, (len(framed), n_free, self._n_frames)
        assert not framed & self._vacant, "a frame is free and in use"
        assert not self._own & self._vacant, "memory of a chunk's own is free for others"
        assert self._n_loading == sum(state == ChunkState.LOADING for state in self._state)
        assert all(self._state[c] in (ChunkState.ABSENT, ChunkState.LOADING) for c in self._wanted)

    @abstractmethod
    def _feed(self) -> list[Load]:
        """Return the reads that can start, of those that someone waits for."""

    @abstractmethod
    def _take_frame(self, is_urgent: bool) -> int | None:
        """Return the frame of a chunk that nobody holds, which is absent then; None where there is none.

        is_urgent: whether somebody waits for the chunk that gets the frame.
        """

    def _start(self, chunk: int, is_urgent: bool = False) -> Load | None:
        """Return the read of `chunk`, which is absent, and count it as under way; None where there is no frame."""
        source = None
        if chunk not in self._own and (source := self._find_frame(chunk, is_urgent)) is None:
            return None
        self._state[chunk] = ChunkState.LOADING
        self._n_loading += 1
        return Load(chunk, source, is_urgent)

    def _find_frame(self, chunk: int, is_urgent: bool) -> int | None:
        """Return a frame for `chunk`: the one that is under it since a read failed, or any that nobody holds."""
        if chunk in self._vacant:
            self._vacant.remove(chunk)
            return chunk
        if self._n_unmade:
            self._n_unmade -= 1
            return NEW_FRAME
        return self._vacant.pop() if self._vacant else self._take_frame(is_urgent)
