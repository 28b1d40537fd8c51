"""Residency event by event: which chunk is read when, into whose frame, and who gives way."""

from __future__ import annotations

from edge_run.tiers.chunk_states import ChunkState, Load
from edge_run.tiers.residency import Residency, in_a_row


def test_after_failed_reads_each_chunk_gets_its_own_frame_back() -> None:
    """The frame of a failed read is still under its chunk: another one moved there would be under it twice."""
    residency = Residency(2, [0, 1], (), 2)
    for load in residency.pump():
        residency.failed(load.chunk)
    assert [(load.chunk, load.source) for load in residency.acquire([0, 1])] == [(0, 0), (1, 1)]


def test_a_read_ahead_that_fails_gives_its_frame_to_who_waits() -> None:
    """The only frame is being filled ahead of need; when that fails, nothing else would start the needed read."""
    residency = Residency(2, [0, 1], (), 1)
    assert [load.chunk for load in residency.pump()] == [0]
    assert residency.acquire([1]) == []
    is_awaited, loads = residency.failed(0)
    assert not is_awaited
    assert loads == [Load(1, 0, is_urgent=True)]


def test_the_same_chunk_asked_for_twice_at_once_is_read_once() -> None:
    """Two weights of one node may lie in one chunk: a second read of it would cost a frame for good."""
    residency = Residency(2, [0, 1], (), 2)
    assert [load.chunk for load in residency.acquire([0, 0])] == [0]
    residency.loaded(0)
    residency.check()
    assert not residency.is_waiting


def test_a_spent_chunk_that_is_next_is_revived_and_not_read() -> None:
    """With a frame to spare at the end of a pass, its last chunk, used again first in the next pass, stays."""
    residency = Residency(3, [0, 1, 2, 0], (), 3)
    for chunk in (0, 1, 2):
        residency.acquire([chunk])
        for _ in range(3):
            if residency.state(chunk) is ChunkState.LOADING:
                residency.loaded(chunk)
        residency.release([chunk])
    assert residency.state(0) is ChunkState.FRESH


def loaded(residency: Residency, *chunks: int) -> None:
    for chunk in chunks:
        residency.loaded(chunk)


def test_the_frame_that_goes_is_the_one_used_last() -> None:
    """In a cycle of three with two frames, the chunk used first comes next: the frame of the other one serves."""
    residency = Residency(3, [0, 1, 2], (), 2)
    loaded(residency, *(load.chunk for load in residency.acquire([0, 1])))
    assert [(load.chunk, load.source) for load in residency.release([0, 1])] == [(2, 1)]
    assert residency.state(0) is ChunkState.FRESH


def test_frames_of_neighbours_go_to_neighbours() -> None:
    """So that one move serves them all; those are still the frames that were used last."""
    residency = Residency(9, range(9), (), 4)
    loaded(residency, *(load.chunk for load in residency.acquire([0, 1, 2, 3])))
    assert [(load.chunk, load.source) for load in residency.release([1, 2, 3])] == [(4, 1), (5, 2), (6, 3)]
    residency.check()


def test_frames_that_would_be_in_each_others_way_are_given_out_as_they_were_taken() -> None:
    """Chunk 1 gives up its frame to 0, and is read itself: whatever is moved there must come after that."""
    loads = [Load(0, 1), Load(1, 3), Load(2, 4)]
    assert in_a_row(loads) == loads
    assert in_a_row([Load(0, 5), Load(1, None), Load(2, 4)]) == [Load(0, 5), Load(1, None), Load(2, 4)]
    assert in_a_row([Load(0, 5), Load(1, 4, is_urgent=True)]) == [Load(0, 4), Load(1, 5, is_urgent=True)]


def test_passes_over_chunks_that_all_have_frames_leave_nothing_behind() -> None:
    residency = Residency(3, [0, 1, 2], (), 3)
    loaded(residency, *(load.chunk for load in residency.pump()))
    for chunk in (0, 1, 2) * 20:
        assert residency.acquire([chunk]) == residency.release([chunk]) == []
    assert len(residency._spent) <= 3


def test_of_the_chunks_read_ahead_the_last_gives_way_and_is_read_again_in_its_turn() -> None:
    residency = Residency(5, [0, 1, 2], (), 2)
    loaded(residency, *(load.chunk for load in residency.pump()))
    assert [(load.chunk, load.source) for load in residency.acquire([4])] == [(4, 1)]
    loaded(residency, 4)
    assert [(load.chunk, load.source) for load in residency.release([4])] == [(1, 4)]


def test_a_chunk_that_no_pass_was_expected_to_use_keeps_no_frame() -> None:
    """Asked for and given up before it came: its frame serves the schedule, as if it had been used."""
    residency = Residency(3, [0, 1], (), 2)
    residency.acquire([2])
    residency.pump()
    residency.release([2])
    loaded(residency, 2, 0)
    assert [(load.chunk, load.source) for load in residency.pump()] == [(1, 2)]


def test_no_read_ahead_starts_what_someone_waits_for_a_second_time() -> None:
    """Chunk 1 waits behind chunk 0 for its read to start; reading it ahead as well would read it twice."""
    residency = Residency(3, [2, 1], (1,), 1)
    residency.pump()
    residency.failed(1)
    assert residency.acquire([0, 1]) == []
    assert residency.pump() == []
    assert [load.chunk for load in residency.loaded(2)] == [0, 1]


def test_too_few_frames_are_noticed_and_what_was_held_stays_held() -> None:
    residency = Residency(3, [0, 1, 2], (), 2)
    for load in residency.acquire([0, 1]):
        residency.loaded(load.chunk)
    assert not residency.is_stuck
    assert residency.acquire([2]) == []
    assert residency.is_stuck, "nobody will ever bring chunk 2"
    residency.release([2])
    assert not residency.is_stuck
    residency.check()
    assert {residency.state(chunk) for chunk in (0, 1)} == {ChunkState.HELD}


def test_while_nothing_else_is_read_pinned_chunks_come_before_their_turn() -> None:
    """As after opening: the one frame is full, and no pass has begun."""
    residency = Residency(8, range(8), (2, 4, 5, 6, 7), 1, most_early=2)
    reads = [load.chunk for load in residency.pump()]
    assert reads == [0], "and nothing beside it"
    for chunk in (0, 2, 4, 5, 6, 7):
        assert reads.pop(0) == chunk
        reads += [load.chunk for load in residency.loaded(chunk)]
        residency.check()
    assert reads == []
    assert not residency.acquire([0])
    residency.release([0])
    assert {chunk for chunk in range(8) if residency.state(chunk) == ChunkState.PINNED} == {2, 4, 5, 6, 7}


def test_a_chunk_whose_early_read_failed_is_read_in_its_turn() -> None:
    residency = Residency(4, range(4), (2, 3), 1, most_early=1)
    assert [load.chunk for load in residency.pump()] == [0]
    assert [load.chunk for load in residency.loaded(0)] == [2]
    assert residency.failed(2) == (False, [])
    residency.check()
    assert [load.chunk for load in residency.pump()] == [3], "it is not tried again before that"
    residency.loaded(3)
    residency.acquire([0])
    assert [load.chunk for load in residency.release([0])] == [1, 2]


def test_who_waits_is_not_held_up_by_early_reads() -> None:
    residency = Residency(6, range(6), (2, 3, 4, 5), 2, most_early=4)
    residency.acquire([0, 1])
    assert not residency.loaded(0), "somebody waits for another"
    assert [load.chunk for load in residency.loaded(1)] == [2, 3, 4, 5]
