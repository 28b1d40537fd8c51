"""A picture of memory for tests of what decides about it: which frame is under which chunk, and what was read there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edge_run.tiers.chunk_states import NEW_FRAME, Load


@dataclass
class Memory:
    """Which frame is under which chunk, and which chunks have their bytes. Refuses moves that memory cannot make."""

    pinned: frozenset[int]
    n_frames: int
    frame_under: dict[int, int] = field(default_factory=dict)
    readable: set[int] = field(default_factory=set)
    n_made: int = 0
    loading: list[Load] = field(default_factory=list)

    def start(self, loads: Sequence[Load], in_use: set[int]) -> None:
        for load in loads:
            assert load.chunk not in self.readable, "a chunk that is in memory is read again"
            assert all(load.chunk != other.chunk for other in self.loading), "a chunk is read twice at once"
            if load.source is None:
                assert load.chunk in self.pinned, "only pinned chunks have memory of their own"
            else:
                assert load.chunk not in self.pinned
                self._move(load.chunk, load.source, in_use)
            self.loading.append(load)

    def _move(self, chunk: int, source: int, in_use: set[int]) -> None:
        if source == NEW_FRAME:
            frame = self.n_made = self.n_made + 1
        else:
            assert source not in in_use, "a frame is taken from under a chunk that is held"
            assert all(source != other.chunk for other in self.loading), "a frame is taken from under a read"
            frame = self.frame_under.pop(source)
            self.readable.discard(source)
        assert chunk not in self.frame_under, "two frames under one chunk"
        self.frame_under[chunk] = frame
        assert len(self.frame_under) <= self.n_frames, "more frames than the plan has"

    def end(self, load: Load) -> None:
        """What was read is there."""
        self.loading.remove(load)
        self.readable.add(load.chunk)

    def fail(self, load: Load, has_frame: bool) -> None:
        """It could not be read; has_frame: its frame is under it all the same."""
        self.loading.remove(load)
        if not has_frame:
            self.frame_under.pop(load.chunk, None)

    def grow(self, n_frames: int) -> None:
        self.n_frames += n_frames

    def shrink(self, n_frames: int, chunks: Sequence[int]) -> None:
        """Give up `n_frames` frames: those under `chunks`, and others that were not made yet."""
        for chunk in chunks:
            assert all(chunk != other.chunk for other in self.loading), "a frame goes from under a read"
            del self.frame_under[chunk]
            self.readable.discard(chunk)
        self.n_frames -= n_frames
        assert len(self.frame_under) <= self.n_frames, "more frames than the plan has"
