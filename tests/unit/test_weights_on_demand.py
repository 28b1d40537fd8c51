"""Weights of which only their users know what comes next: held, read when acquired, and guesses taken back."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from edge_run.base.errors import TierReadError
from edge_run.tiers.residency import ChunkState
from weights_tier import CHUNK, WAIT_S, tier


@pytest.mark.parametrize("seed", range(4))
def test_what_is_held_and_acquired_at_random_is_what_the_file_holds(tmp_path: Path, seed: int) -> None:
    """A cache holds some chunks and changes its mind; a pass acquires others, and some of the same."""
    choose = random.Random(seed)
    with tier(tmp_path, [40 * CHUNK], (), n_frames=16, is_on_demand=True) as streamed:
        kept: list[int] = []
        for _ in range(60):
            while len(kept) > choose.randrange(11):
                streamed.weights.release([kept.pop(choose.randrange(len(kept)))])
            new = [c for c in choose.sample(range(40), 3) if c not in kept][: 11 - len(kept)]
            streamed.weights.hold(new)
            kept += new
            asked = [*choose.sample(kept, min(2, len(kept))), *choose.sample(range(40), 3)]
            streamed.weights.acquire(asked)
            assert all(streamed.is_right(chunk) for chunk in asked)
            streamed.weights.release(asked)
            streamed.residency.check()
        streamed.settle()
        assert all(streamed.is_right(chunk) for chunk in kept)


def test_a_read_that_somebody_waits_for_overtakes_the_others(tmp_path: Path) -> None:
    with tier(tmp_path, [24 * CHUNK], (), n_frames=24, n_readers=1, is_on_demand=True) as streamed:
        may_read = streamed.hold_reads()
        streamed.weights.hold(range(20))
        streamed.await_read()
        threading.Timer(0.05, may_read.set).start()
        streamed.weights.acquire([17])
        assert [offset // CHUNK for offset, _ in streamed.reads[:2]] == [0, 16]
        assert streamed.is_right(17)


def test_reads_that_nobody_wants_any_more_are_not_made(tmp_path: Path) -> None:
    with tier(tmp_path, [24 * CHUNK], (), n_frames=12, n_readers=1, is_on_demand=True) as streamed:
        may_read = streamed.hold_reads()
        streamed.weights.hold(range(12))
        streamed.await_read()
        streamed.weights.release(range(4, 12))
        streamed.weights.hold(range(12, 16))
        threading.Timer(0.05, may_read.set).start()
        streamed.weights.acquire([20, 21])
        streamed.settle()
        assert {offset // CHUNK for offset, _ in streamed.reads}.isdisjoint(range(4, 12))
        assert all(streamed.is_right(chunk) for chunk in (0, 3, 12, 15, 20, 21))
        streamed.residency.check()


def test_a_held_chunk_whose_read_failed_is_read_when_it_is_acquired(tmp_path: Path) -> None:
    with tier(tmp_path, [4 * CHUNK], (), n_frames=4, is_on_demand=True) as streamed:
        failures = [TierReadError("once")]

        def fail(offset: int) -> None:
            if failures:
                raise failures.pop()

        streamed.fail = fail
        streamed.weights.hold([0])
        streamed.settle()
        assert streamed.residency.state(0) is ChunkState.ABSENT
        streamed.weights.acquire([0])
        assert streamed.is_right(0)


def test_a_read_that_was_begun_for_nobody_and_fails_is_made_again_for_whoever_waits(tmp_path: Path) -> None:
    with tier(tmp_path, [4 * CHUNK], [], n_frames=4, n_readers=1, is_on_demand=True) as streamed:
        may_fail, n_failures = threading.Event(), 0

        def fail_once(offset: int) -> None:
            nonlocal n_failures
            n_failures += 1
            if n_failures == 1:
                assert may_fail.wait(WAIT_S)
                raise TierReadError("once")

        streamed.fail = fail_once
        streamed.weights.hold([1])
        streamed.await_read()
        streamed.weights.acquire([1], check=may_fail.set)
        assert streamed.is_right(1)
        assert n_failures == 2


def test_a_read_that_is_made_again_and_fails_again_is_raised(tmp_path: Path) -> None:
    with tier(tmp_path, [4 * CHUNK], [], n_frames=4, n_readers=1, is_on_demand=True) as streamed:
        may_fail = threading.Event()

        def fail(offset: int) -> None:
            assert may_fail.wait(WAIT_S)
            raise TierReadError("always")

        streamed.fail = fail
        streamed.weights.hold([1])
        streamed.await_read()
        with pytest.raises(TierReadError, match="always"):
            streamed.weights.acquire([1], check=may_fail.set)
        assert len(streamed.reads) == 2


def test_guesses_are_read_in_small_pieces_and_can_be_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_run.tiers.weights.GUESS_BYTES", 2 * CHUNK)
    with tier(tmp_path, [16 * CHUNK], [], n_frames=16, n_readers=1, is_on_demand=True) as streamed:
        may_read = streamed.hold_reads()
        streamed.weights.hold(range(6), is_guess=True)
        streamed.await_read()
        assert streamed.weights.unread(range(16)) == 4  # two are being read
        streamed.weights.release(range(2, 6))
        may_read.set()
        streamed.weights.acquire([8])
        streamed.settle()
        assert [length for _, length in streamed.reads] == [2 * CHUNK, CHUNK]
        assert streamed.weights.unread(range(16)) == 0
        assert streamed.is_right(0)
        assert streamed.is_right(8)


def test_what_was_let_go_last_makes_room_first(tmp_path: Path) -> None:
    """A cycle larger than the memory finds again what is older: the other way round, it would find nothing."""
    with tier(tmp_path, [24 * CHUNK], (), n_frames=8, is_on_demand=True) as streamed:
        for _ in range(3):
            for chunk in range(12):
                streamed.weights.acquire([chunk])
                assert streamed.is_right(chunk)
                streamed.weights.release([chunk])
        assert len(streamed.reads) == 12 + 4 + 4
