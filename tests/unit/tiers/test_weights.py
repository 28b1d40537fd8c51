"""Weights in memory: the bytes of real files under the addresses of their chunks, whatever the order and what fails."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from edge_run.base.errors import BudgetError, Cancelled, ModelFileError, TierReadError
from edge_run.partition.plan import plan_residency
from edge_run.prefetch.schedule import Segment, schedule_pass
from edge_run.tiers import _libc, weights
from edge_run.tiers.chunk_states import ChunkState
from edge_run.tiers.weights import MAX_READ_CHUNKS
from mapped import PAGE, content, is_readable, mapped
from waiting import until
from weights_tier import CHUNK, WAIT_S, Tier, tier


def run_pass(tier: Tier, schedule: Sequence[Segment], *, is_soon: bool = False) -> None:
    """Compute one pass: look at every byte of every segment. is_soon: frames are given back by readers."""
    release = tier.weights.release_soon if is_soon else tier.weights.release
    for segment in schedule:
        tier.weights.acquire(segment.acquire)
        assert all(tier.is_right(chunk) for chunk in segment.needs)
        release(segment.release)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n_readers", [1, 4])
def test_what_is_acquired_is_what_the_file_holds(tmp_path: Path, n_readers: int, seed: int) -> None:
    """Random schedules over two shards of odd sizes, off the grid, under random budgets from the least up."""
    choose = random.Random(seed)
    sizes = [choose.randint(8, 20) * CHUNK + choose.randint(1, CHUNK) for _ in range(2)]
    shift = choose.randrange(4) * PAGE
    with mapped(sizes, CHUNK, shift_bytes=shift) as shape:
        n_chunks, ragged = shape.n_chunks, shape.unmovable
    needs = []
    for _ in range(choose.randint(5, 20)):
        first = choose.randrange(n_chunks)
        needs.append(frozenset(range(first, min(n_chunks, first + choose.randint(1, 6)))))
    schedule = schedule_pass(needs, [choose.random() < 0.8 for _ in needs])
    used_ragged = ragged.intersection(*[{c for segment in schedule for c in segment.needs}])
    least = len(used_ragged) + max(len(set(segment.needs) - ragged) for segment in schedule)
    plan = plan_residency(
        [segment.needs for segment in schedule], ragged, 1, least + choose.choice([0, 0, 1, 3, 8, 50]), 0
    )
    order = [chunk for segment in schedule for chunk in segment.acquire]
    with tier(
        tmp_path, sizes, order, plan.pinned, plan.n_frames, n_readers=n_readers, shift_bytes=shift
    ) as weights_tier:
        weights_tier.weights.start()
        for i in range(6):
            run_pass(weights_tier, schedule, is_soon=i % 2 == seed % 2)
        weights_tier.settle()
        weights_tier.residency.check()


def test_what_is_let_go_soon_is_read_over_by_readers(tmp_path: Path) -> None:
    with tier(tmp_path, [8 * CHUNK], range(8), (), 2, n_readers=1) as streamed:
        streamed.weights.acquire([0, 1])
        streamed.weights.release_soon([0, 1])
        until(lambda: ChunkState.FRESH in (streamed.residency.state(2), streamed.residency.state(3)), WAIT_S)


def test_who_acquires_does_not_wait_for_a_reader_to_take_what_was_let_go(tmp_path: Path) -> None:
    """All of them may be at a long read: the frames are taken by whoever needs them."""
    with tier(tmp_path, [8 * CHUNK], range(8), (), 3, n_readers=1) as streamed:
        streamed.weights.acquire([0, 1])
        may_read = streamed.hold_reads()
        streamed.reads.clear()
        streamed.weights.start()
        streamed.await_read()
        streamed.weights.release_soon([0, 1])
        assert {streamed.residency.state(chunk) for chunk in (0, 1)} == {ChunkState.HELD}
        threading.Timer(0.05, may_read.set).start()
        streamed.weights.acquire([4, 5, 6])
        assert all(streamed.is_right(chunk) for chunk in (4, 5, 6))


def test_neighbours_are_read_together(tmp_path: Path) -> None:
    """Large reads are what drives are fast at."""
    everything = range(12)
    with tier(tmp_path, [12 * CHUNK], everything, everything, n_readers=1) as all_pinned:
        all_pinned.weights.start()
        all_pinned.weights.acquire(everything)
        assert all_pinned.reads == [(i * CHUNK, MAX_READ_CHUNKS * CHUNK) for i in range(0, 12, MAX_READ_CHUNKS)]
        assert all_pinned.weights.read_bytes == 12 * CHUNK


def test_neighbours_by_number_with_a_hole_between_them_are_not(tmp_path: Path) -> None:
    """A read across the hole would write over memory that is not ours."""
    hole = range(2 * CHUNK, 4 * CHUNK)
    everything = range(4)
    with tier(tmp_path, [6 * CHUNK], everything, everything, hole=hole) as all_pinned:
        area = all_pinned.address_space.spans[0].stop
        assert _libc.view(area, 1)[0] == 0
        all_pinned.weights.acquire(everything)
        assert all(all_pinned.is_right(chunk) for chunk in everything)
        assert content(area, hole.stop - hole.start) == bytes(hole.stop - hole.start)


def test_what_is_needed_now_is_read_ahead_of_what_is_not(tmp_path: Path) -> None:
    with tier(tmp_path, [16 * CHUNK], range(16), (), 8, n_readers=1) as streamed:
        may_read = streamed.hold_reads()
        streamed.weights.start()
        waiting = threading.Thread(target=streamed.weights.acquire, args=([12],))
        waiting.start()
        threading.Timer(0.1, may_read.set).start()
        waiting.join(WAIT_S)
        assert streamed.is_right(12)
        assert streamed.reads.index((12 * CHUNK, CHUNK)) <= 1, "behind the read in flight, before all others"


def test_a_failed_read_is_raised_where_it_is_needed_and_the_next_try_works(tmp_path: Path) -> None:
    with tier(tmp_path, [8 * CHUNK], range(8), (), 4) as streamed:
        is_broken = threading.Event()
        is_broken.set()

        def fail(offset: int) -> None:
            if is_broken.is_set():
                raise TierReadError("the drive is gone")

        streamed.fail = fail
        with pytest.raises(TierReadError, match="the drive is gone"):
            streamed.weights.acquire([0, 1])
        streamed.settle()
        streamed.residency.check()
        assert {streamed.residency.state(chunk) for chunk in (0, 1)} == {ChunkState.ABSENT}
        is_broken.clear()
        streamed.weights.acquire([0, 1])
        assert streamed.is_right(0)
        assert streamed.is_right(1)


@pytest.mark.parametrize("n_failures", [1, 2])
def test_a_read_that_fails_as_drives_do_for_a_moment_is_tried_once_more(
    tmp_path: Path, n_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a USB drive is reset: all answers that share the pass would end with it."""
    monkeypatch.setattr(weights, "PAUSE_S", 0.01)
    with tier(tmp_path, [8 * CHUNK], range(8), (), 4, n_readers=1) as streamed:
        failures = streamed.fail_first(TierReadError("a bad moment", errno=errno.EIO), n_failures)
        if n_failures == 2:
            with pytest.raises(TierReadError, match="a bad moment"):
                streamed.weights.acquire([0])
            streamed.settle()
            assert not failures
        streamed.weights.acquire([0])
        assert streamed.is_right(0)
        streamed.residency.check()


@pytest.mark.parametrize("seed", range(6))
def test_reads_that_fail_now_and_then_never_give_wrong_bytes(tmp_path: Path, seed: int) -> None:
    """Each failure ends a pass, wherever it was; the next one starts over, as after a cable that shook."""
    choose, lock = random.Random(seed), threading.Lock()
    schedule = schedule_pass([frozenset({i, i + 1, i + 2}) for i in range(0, 27, 2)], [True] * 14)
    order = [chunk for segment in schedule for chunk in segment.acquire]
    with tier(tmp_path, [29 * CHUNK], order, (7, 19), 6) as streamed:

        def fail(offset: int) -> None:
            with lock:
                if choose.random() < 0.05:
                    raise TierReadError("a bad moment")

        streamed.fail = fail
        streamed.weights.start()
        n_failures = n_passes = 0
        while n_passes < 15 or (n_failures < 2 and n_passes < 500):  # a failure ahead of need ends no pass
            held: set[int] = set()
            try:
                for segment in schedule:
                    streamed.weights.acquire(segment.acquire)
                    held |= set(segment.acquire)
                    assert all(streamed.is_right(chunk) for chunk in segment.needs)
                    streamed.weights.release(segment.release)
                    held -= set(segment.release)
                n_passes += 1
            except TierReadError:
                streamed.weights.release(held)
                n_failures += 1
            streamed.residency.check()
        assert n_failures > 1, "nothing failed: nothing was tested"


def test_a_failure_ahead_of_need_harms_nobody(tmp_path: Path) -> None:
    """It was not needed yet: it is read again when it is."""
    with tier(tmp_path, [4 * CHUNK], range(4), (), 4) as streamed:
        streamed.fail_first(TierReadError("once"))
        streamed.weights.start()
        streamed.settle()
        for chunk in range(4):
            streamed.weights.acquire([chunk])
            assert streamed.is_right(chunk)


def test_whoever_waits_behind_a_failing_read_is_served(tmp_path: Path) -> None:
    """The only frame is promised to chunk 0, whose read fails: chunk 1 must get it, and not wait for ever."""
    with tier(tmp_path, [2 * CHUNK], [0, 1], (), 1, n_readers=1) as streamed:
        may_fail = threading.Event()

        def fail(offset: int) -> None:
            if offset == 0:
                assert may_fail.wait(WAIT_S)
                raise TierReadError("late")

        streamed.fail = fail
        streamed.weights.start()
        threading.Timer(0.1, may_fail.set).start()
        assert streamed.weights.acquire([1]) > 0
        assert streamed.is_right(1)


def test_a_file_cut_short_is_told_as_such(tmp_path: Path) -> None:
    with tier(tmp_path, [8 * CHUNK], range(8), (), 4) as streamed:
        with (tmp_path / "shard-0").open("r+b") as file:
            file.truncate(5 * CHUNK)
        streamed.weights.acquire([4])
        streamed.weights.release([4])
        with pytest.raises(ModelFileError, match="cut while in use"):
            streamed.weights.acquire([5])


def test_more_than_there_are_frames_for_is_refused_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    with tier(tmp_path, [4 * CHUNK], range(4), (), 2) as streamed:
        streamed.weights.acquire([0])
        with pytest.raises(BudgetError, match="too few frames"):
            streamed.weights.acquire([1, 2])
        streamed.weights.acquire([1])
        assert streamed.is_right(0)
        assert streamed.is_right(1)


def test_a_check_that_raises_ends_the_wait(tmp_path: Path) -> None:
    """So Ctrl-C works while a slow drive reads; what was asked for arrives later and is used then."""
    with tier(tmp_path, [4 * CHUNK], range(4), (), 2) as streamed:
        may_read = streamed.hold_reads()

        def check() -> None:
            raise Cancelled("enough")

        streamed.check = check
        with pytest.raises(Cancelled):
            streamed.weights.acquire([0, 1])
        streamed.check = lambda: None
        may_read.set()
        streamed.weights.acquire([0, 1])
        assert streamed.is_right(0)
        assert streamed.is_right(1)
        streamed.settle()
        streamed.residency.check()


def test_what_is_released_and_replaced_cannot_be_read(tmp_path: Path) -> None:
    """A read of weights that are gone must stop the process, not give yesterday's bytes."""
    with tier(tmp_path, [3 * CHUNK], range(3), (), 1) as streamed:
        streamed.weights.acquire([0])
        streamed.weights.release([0])
        streamed.weights.acquire([2])
        assert not is_readable(streamed.address_space.place(0).address)


def test_what_is_kept_is_read_once_and_what_is_given_up_is_not_there(tmp_path: Path) -> None:
    """Chunks come into memory of their own while others stream, and stream again afterwards; their memory is gone."""
    schedule = schedule_pass([frozenset([i]) for i in range(1, 11)], [True] * 10, 1)
    order = [chunk for segment in schedule for chunk in segment.acquire]
    lent = (2, 5, 6, 9)
    with tier(tmp_path, [12 * CHUNK], order, (), 2) as streamed:
        streamed.weights.start()
        for _ in range(3):
            run_pass(streamed, schedule)
            streamed.weights.pin(lent)
            run_pass(streamed, schedule)
            streamed.settle()
            streamed.residency.check()
            streamed.reads.clear()
            run_pass(streamed, schedule)
            read = {offset // CHUNK + i for offset, length in streamed.reads for i in range(length // CHUNK)}
            assert not read.intersection(lent)
            assert all(streamed.is_right(chunk) for chunk in lent)
            streamed.weights.unpin(lent)
            streamed.residency.check()
            assert not any(is_readable(streamed.address_space.place(chunk).address) for chunk in lent)
        run_pass(streamed, schedule)


def test_giving_up_waits_for_reads_in_progress_and_can_be_stopped(tmp_path: Path) -> None:
    with tier(tmp_path, [8 * CHUNK], range(1, 7), (), 2) as streamed:
        may_read = streamed.hold_reads()
        streamed.weights.pin([1, 2])
        streamed.await_read()

        def stop() -> None:
            raise Cancelled("the pass was cancelled")

        streamed.check = stop
        with pytest.raises(Cancelled):
            streamed.weights.unpin([1, 2])
        streamed.check = lambda: None
        threading.Timer(0.05, may_read.set).start()
        streamed.weights.unpin([1, 2])
        assert streamed.residency.state(1) is streamed.residency.state(2) is ChunkState.ABSENT
        streamed.residency.check()
        run_pass(streamed, schedule_pass([frozenset([i]) for i in range(1, 7)], [True] * 6, 1))


@pytest.mark.parametrize("is_on_demand", [False, True])
def test_what_is_exposed_reads_as_zeros_and_what_is_in_memory_stays(tmp_path: Path, is_on_demand: bool) -> None:
    """Reads that were about to begin wait until it ends; then all is as before."""
    order = range(12)
    with tier(tmp_path, [12 * CHUNK], order, (), 4, is_on_demand=is_on_demand) as streamed:
        weights, place = streamed.weights, streamed.address_space.place
        weights.acquire([2, 3, 7])
        streamed.settle()
        weights.expose(but=[9])
        assert not is_readable(place(9).address)
        absent = [c for c in range(12) if c != 9 and streamed.residency.state(c) is ChunkState.ABSENT]
        assert len(absent) >= 7
        assert all(content(place(c).address, CHUNK) == bytes(CHUNK) for c in absent)
        assert all(streamed.is_right(chunk) for chunk in (2, 3, 7))
        weights.release([2, 3, 7])
        assert all(content(place(c).address, CHUNK) == bytes(CHUNK) for c in absent), "no read begins"
        weights.hide()
        streamed.settle()
        streamed.residency.check()
        states = [streamed.residency.state(chunk) for chunk in range(12)]
        absent = [c for c, state in enumerate(states) if state is ChunkState.ABSENT]
        assert not any(is_readable(place(chunk).address) for chunk in absent)
        for chunk in range(12):
            weights.acquire([chunk])
            assert streamed.is_right(chunk)
            weights.release([chunk])


def test_a_read_that_nobody_waits_for_is_not_tried_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader goes on at once, with what is waited for."""
    monkeypatch.setattr(weights, "PAUSE_S", 60.0)
    with tier(tmp_path, [8 * CHUNK], range(8), (), 4, n_readers=1) as streamed:
        failures = streamed.fail_first(TierReadError("a bad moment", errno=errno.EIO))
        streamed.weights.start()
        streamed.settle()
        assert not failures
        streamed.weights.acquire([0])
        assert streamed.is_right(0)
