"""Weights of which only their users know what comes next: held, read when acquired, and guesses taken back."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_run.base.errors import BudgetError, EdgeRunError, ModelFileError, TierReadError
from edge_run.tiers.chunk_states import ChunkState
from mapped import PAGE, is_readable
from weights_tier import CHUNK, WAIT_S, Tier, tier


def hold_and_acquire(streamed: Tier, choose: random.Random, kept: list[int], n_kept: int, n_others: int) -> list[int]:
    """Have a cache hold a few more of 40 chunks, `n_kept` at most; return what a pass then acquired, as the file is."""
    new = [chunk for chunk in choose.sample(range(40), 3) if chunk not in kept][: n_kept - len(kept)]
    streamed.weights.hold(new)
    kept += new
    asked = [*choose.sample(kept, min(2, len(kept))), *choose.sample(range(40), n_others)]
    streamed.weights.acquire(asked)
    assert all(streamed.is_right(chunk) for chunk in asked)
    return asked


@pytest.mark.parametrize("seed", range(4))
def test_what_is_held_and_acquired_at_random_is_what_the_file_holds(tmp_path: Path, seed: int) -> None:
    """A cache holds some chunks and changes its mind; a pass acquires others, and some of the same."""
    choose = random.Random(seed)
    with tier(tmp_path, [40 * CHUNK], (), n_frames=16, is_on_demand=True) as streamed:
        kept: list[int] = []
        for _ in range(60):
            while len(kept) > choose.randrange(11):
                streamed.weights.release([kept.pop(choose.randrange(len(kept)))])
            asked = hold_and_acquire(streamed, choose, kept, 11, n_others=3)
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
        streamed.check = may_fail.set
        streamed.weights.acquire([1])
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
        streamed.check = may_fail.set
        with pytest.raises(TierReadError, match="always"):
            streamed.weights.acquire([1])
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


@pytest.mark.parametrize("lost", [2, 6], ids=["at the start", "at the end"])
def test_a_ragged_chunk_whose_read_failed_is_no_frame_for_others(tmp_path: Path, lost: int) -> None:
    """It is smaller than they are: a whole one moved from it would take along what lies behind the mapping."""
    hole = range(2 * CHUNK, 3 * CHUNK + PAGE)
    with tier(tmp_path, [8 * CHUNK - PAGE], (), n_frames=2, hole=hole, is_on_demand=True) as streamed:
        assert streamed.address_space.unmovable == {2, 6}
        start = streamed.address_space.place(lost).file_offset
        failures = [TierReadError("once")]

        def fail(offset: int) -> None:
            if offset == start and failures:
                raise failures.pop()

        streamed.fail = fail
        with pytest.raises(TierReadError, match="once"):
            streamed.weights.acquire([lost])
        for chunks in ([0, 1], [3, 4, lost], [5, 1], [8 - lost, 0]):
            streamed.weights.acquire(chunks)
            assert all(streamed.is_right(chunk) for chunk in chunks)
            streamed.weights.release(chunks)
            streamed.residency.check()


def test_whatever_ends_a_read_the_consumer_hears_of_it_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tier(tmp_path, [4 * CHUNK], (), n_frames=4, n_readers=1, is_on_demand=True) as streamed:
        failures: list[tuple[Exception, type[EdgeRunError], str]] = [
            (OSError(5, "Input/output error"), TierReadError, "Input/output error"),
            (OSError(12, "Cannot allocate memory"), BudgetError, "Cannot allocate memory"),
            (MemoryError(), BudgetError, "out of memory"),
            (ZeroDivisionError("what"), TierReadError, "please report this"),
        ]
        for failure, kind, message in failures:

            def fail(offset: int, failure: Exception = failure) -> None:
                raise failure

            streamed.fail = fail
            with pytest.raises(kind, match=message):
                streamed.weights.acquire([1])
        streamed.fail = lambda offset: None
        streamed.weights.acquire([1])
        assert streamed.is_right(1)
        assert "ZeroDivisionError" in caplog.text, "a mistake of ours is told where it was made"


def _edit(path: Path) -> None:
    """Change one byte of the first chunk, and set the time of the change back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(PAGE + 5)
        byte = file.read(1)
        file.seek(PAGE + 5)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def _swap_pages(path: Path) -> None:
    before, data = path.stat(), path.read_bytes()
    path.write_bytes(data[PAGE : 2 * PAGE] + data[:PAGE] + data[2 * PAGE :])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("edit", [_edit, _swap_pages])
def test_an_edit_whose_time_was_set_back_is_noticed_when_it_is_read(
    tmp_path: Path, edit: Callable[[Path], None]
) -> None:
    with tier(tmp_path, [4 * CHUNK + 5], (), n_frames=1, is_on_demand=True) as streamed:
        for chunk in (0, 1, 4, 2):
            streamed.weights.acquire([chunk])
            streamed.weights.release([chunk])
        edit(streamed.sources[0].path)
        streamed.sources[0].check_unchanged()
        with pytest.raises(ModelFileError, match="changed while it was in use"):
            streamed.weights.acquire([0])
        streamed.weights.acquire([1])
        assert streamed.is_right(1), "what is as it was can be read"


@pytest.mark.parametrize("how", ["mode", "link", "name"])
def test_what_leaves_the_content_alone_is_no_change(tmp_path: Path, how: str) -> None:
    """All three change the time of the last change to the file's entry, as an edit does."""
    with tier(tmp_path, [4 * CHUNK + 5], (), n_frames=1, is_on_demand=True) as streamed:
        path = streamed.sources[0].path
        streamed.weights.acquire([0])
        streamed.weights.release([0])
        {
            "mode": lambda: path.chmod(0o640),
            "link": lambda: os.link(path, tmp_path / "other"),
            "name": lambda: path.rename(tmp_path / "other"),
        }[how]()
        streamed.sources[0].check_unchanged()
        assert streamed.sources[0].is_doubtful
        for chunk in (1, 0, 4):
            streamed.weights.acquire([chunk])
            assert streamed.is_right(chunk)
            streamed.weights.release([chunk])


def test_frames_that_come_and_go_never_take_what_is_held(tmp_path: Path) -> None:
    """While readers are slow, and some of what is read is wanted by nobody any more."""
    choose = random.Random(5)
    with tier(tmp_path, [40 * CHUNK], (), n_frames=8, is_on_demand=True) as streamed:
        streamed.fail = lambda offset: threading.Event().wait(choose.random() / 500) and None
        kept: list[int] = []
        n_frames = 8
        for _ in range(60):
            if choose.random() < 0.5:
                more = choose.randrange(1, 6)
                streamed.weights.grow(more)
                n_frames += more
            room = choose.randrange(1, n_frames)
            while len(kept) > room:
                streamed.weights.release([kept.pop(choose.randrange(len(kept)))])
            n_less = n_frames - max(6, len(kept) + 4)
            while n_less > 0:
                n_gone = streamed.weights.shrink(n_less)
                assert 0 < n_gone <= n_less
                n_less, n_frames = n_less - n_gone, n_frames - n_gone
            asked = hold_and_acquire(streamed, choose, kept, n_frames - 3, n_others=2)
            assert mapped_chunks(streamed) <= n_frames
            streamed.weights.release(asked)
            streamed.residency.check()
        streamed.settle()
        assert all(streamed.is_right(chunk) for chunk in kept)


def test_frames_that_are_being_read_into_are_waited_for_and_that_can_be_stopped(tmp_path: Path) -> None:
    with tier(tmp_path, [8 * CHUNK], (), n_frames=4, n_readers=1, is_on_demand=True) as streamed:
        may_read = streamed.hold_reads()
        streamed.weights.hold(range(4))
        streamed.await_read()
        streamed.weights.release(range(4))

        def stop() -> None:
            raise InterruptedError

        streamed.check = stop
        with pytest.raises(InterruptedError):
            streamed.weights.shrink(3)
        streamed.residency.check()
        streamed.check = may_read.set
        n_gone = 0
        while n_gone < 3:
            n_gone += streamed.weights.shrink(3 - n_gone)
        streamed.settle()
        assert mapped_chunks(streamed) <= 1
        for chunk in (7, 0, 3):
            streamed.weights.acquire([chunk])
            assert streamed.is_right(chunk)
            streamed.weights.release([chunk])
        with pytest.raises(BudgetError, match="too few frames"):
            streamed.weights.acquire([1, 2])


def test_what_is_under_a_frame_that_went_cannot_be_read(tmp_path: Path) -> None:
    with tier(tmp_path, [8 * CHUNK], (), n_frames=3, is_on_demand=True) as streamed:
        streamed.weights.acquire([0, 1, 2])
        streamed.weights.release([0, 2])
        assert streamed.weights.shrink(5) == 2
        readable = [is_readable(streamed.address_space.place(chunk).address) for chunk in range(3)]
        assert readable == [False, True, False]
        assert streamed.weights.shrink(0) == 0
        streamed.weights.grow(1)
        streamed.weights.acquire([2])
        assert streamed.is_right(2)
        assert streamed.is_right(1)


def mapped_chunks(streamed: Tier) -> int:
    """How many chunks have memory."""
    places = (streamed.address_space.place(chunk) for chunk in range(streamed.address_space.n_chunks))
    return sum(is_readable(place.address) for place in places)
