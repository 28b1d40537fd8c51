"""Moves of frames: neighbours go together, none is lost, and what the kernel refuses is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_run.base.errors import TierReadError
from edge_run.tiers import _libc
from edge_run.tiers.address_space import AddressSpace, FrameMoves, MappedSpan
from edge_run.tiers.chunk_states import NEW_FRAME, ChunkState, Load
from weights_tier import CHUNK, tier


class NotedMoves(AddressSpace):
    """An address space without memory. moves: what was asked of it, (chunk, source, count) each."""

    def __init__(self) -> None:
        super().__init__([MappedSpan(0, 0, 16 * CHUNK, 0)], CHUNK)
        self.moves: list[tuple[int, int | None, int]] = []
        self.refuses = -1

    def map(self, chunk: int, source: int | None, count: int = 1) -> None:
        self.moves.append((chunk, source, count))
        if chunk == self.refuses:
            raise OSError(12, "Cannot allocate memory")


def test_moves_are_made_in_the_order_in_which_they_were_asked_for_whichever_read_comes_first() -> None:
    space = NotedMoves()
    moves = FrameMoves(space)
    moves.ask([Load(1, NEW_FRAME)])
    later = moves.ask([Load(5, 1)])  # the frame that goes to chunk 1 first
    moves.ask([Load(9, 5)])
    moves.make(later)
    assert space.moves == [(1, NEW_FRAME, 1), (5, 1, 1)]
    moves.make(later)
    assert len(space.moves) == 2, "each is made once"
    moves.make()
    assert space.moves[2:] == [(9, 5, 1)]


def test_a_refused_move_is_told_to_the_reads_of_its_chunks_until_it_is_forgotten() -> None:
    space = NotedMoves()
    space.refuses, moves = 2, FrameMoves(space)
    moves.ask([Load(2, 8), Load(3, 9)])
    moves.ask([Load(7, NEW_FRAME)])
    moves.make()
    moves.check([Load(7, NEW_FRAME)])
    with pytest.raises(TierReadError, match=r"vm\.max_map_count"):
        moves.check([Load(3, 9)])
    assert [moves.forget_refused(chunk) for chunk in (2, 3, 3, 7)] == [True, True, False, False]
    moves.check([Load(2, 8), Load(3, 9)])


def test_frames_of_neighbours_move_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the kernel for each read, not for each chunk: other processors are told of every one."""
    real, lengths = _libc.move_pages, list[int]()

    def move_pages(source: int, target: int, length: int) -> None:
        lengths.append(length)
        real(source, target, length)

    monkeypatch.setattr(_libc, "move_pages", move_pages)
    with tier(tmp_path, [12 * CHUNK], range(12), (), 3, n_readers=1) as streamed:
        for first in (*range(0, 12, 3), 0):
            chunks = range(first, first + 3)
            streamed.weights.acquire(chunks)
            assert all(streamed.is_right(chunk) for chunk in chunks)
            streamed.weights.release(chunks)
        streamed.settle()
    assert set(lengths) == {3 * CHUNK}


@pytest.mark.parametrize("n_chunks_at_once", [1, 3])
def test_a_move_that_the_kernel_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_chunks_at_once: int) -> None:
    """vm.max_map_count is reached in the middle: the error says so, the frames are made anew, and no byte is wrong."""
    with tier(tmp_path, [12 * CHUNK], range(12), (), 2 * n_chunks_at_once) as streamed:
        real, refusals = _libc.move_pages, [True, True]

        def move_pages(source: int, target: int, length: int) -> None:
            if refusals:
                refusals.pop()
                raise OSError(12, "Cannot allocate memory")
            real(source, target, length)

        monkeypatch.setattr(_libc, "move_pages", move_pages)
        errors: list[str] = []
        for _ in range(3):
            for first in range(0, 12, n_chunks_at_once):
                chunks = range(first, first + n_chunks_at_once)
                try:
                    streamed.weights.acquire(chunks)
                except TierReadError as error:
                    errors.append(str(error))
                    streamed.weights.acquire(chunks)
                assert all(streamed.is_right(chunk) for chunk in chunks)
                streamed.weights.release(chunks)
                streamed.residency.check()
        assert not refusals, "no move was tried: nothing was tested"
        assert all("vm.max_map_count" in error for error in errors)


def test_a_frame_that_is_to_go_elsewhere_outlives_what_is_given_up_where_it_lies(tmp_path: Path) -> None:
    with tier(tmp_path, [8 * CHUNK], range(8), (), 3, n_readers=1) as streamed:
        streamed.weights.acquire([0, 1, 2])
        may_read = streamed.hold_reads()
        streamed.weights.release([0])
        streamed.await_read()
        streamed.weights.release([1])
        assert streamed.residency.state(4) is ChunkState.LOADING, "into the frame that lies at chunk 1 still"
        streamed.weights.pin([1])
        assert streamed.residency.state(1) is ChunkState.ABSENT
        streamed.weights.unpin([1])
        may_read.set()
        streamed.weights.acquire([3, 4])
        assert streamed.is_right(3)
        assert streamed.is_right(4)
        streamed.residency.check()
