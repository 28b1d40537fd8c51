"""Which drive a read goes to, on a clock that a test moves."""

from __future__ import annotations

import pytest

from edge_run.base.units import MIB
from edge_run.tiers.drives.stripes import LEAST_PATIENCE_S, LEAST_REST_S, MOST_REST_S, Stripes

READ = 2 * MIB


class Rig:
    """Two drives that deliver `bytes_per_s` each, and four readers that each read one thing after another."""

    def __init__(self, *bytes_per_s: float) -> None:
        self.now_s, self.bytes_per_s = 0.0, list(bytes_per_s)
        self.stripes = Stripes(len(bytes_per_s), lambda: self.now_s)
        self.idle_s = [0.0] * len(bytes_per_s)  # until when each is busy
        self.ends: list[tuple[float, int]] = []
        self.counts = [0] * len(bytes_per_s)

    def begin(self) -> None:
        drive = self.stripes.begin(READ)
        assert drive is not None
        self.idle_s[drive] = max(self.idle_s[drive], self.now_s) + READ / self.bytes_per_s[drive]
        self.ends.append((self.idle_s[drive], drive))

    def run(self, n_reads: int) -> float:
        """Return the bytes per second of so many reads."""
        started_s, self.counts = self.now_s, [0] * len(self.counts)
        while len(self.ends) < 4:
            self.begin()
        for _ in range(n_reads):
            self.ends.sort()
            self.now_s, drive = self.ends.pop(0)
            self.stripes.end(drive, READ)
            self.counts[drive] += 1
            self.begin()
        return n_reads * READ / (self.now_s - started_s)


def test_equal_drives_deliver_twice_as_much() -> None:
    rig = Rig(250e6, 250e6)
    rig.run(20)
    assert rig.run(200) >= 1.97 * 250e6
    assert abs(rig.counts[0] - rig.counts[1]) <= 4


def test_a_slower_drive_delivers_what_it_can() -> None:
    rig = Rig(1000e6, 250e6)
    rig.run(50)
    assert rig.run(400) >= 0.88 * 1250e6


def test_a_drive_that_slows_down_and_recovers() -> None:
    """It is hardly read from meanwhile, and takes its share again afterwards."""
    rig = Rig(500e6, 500e6)
    rig.run(100)
    rig.bytes_per_s[1] = 1e6
    rig.run(100)
    assert rig.run(1000) >= 0.9 * 500e6
    rig.bytes_per_s[1] = 500e6
    rig.run(20_000)
    assert rig.run(200) >= 1.9 * 500e6


def test_short_reads_say_nothing_about_bandwidth() -> None:
    """As the first ones, of rows, on a drive that takes long to begin."""
    now_s = 0.0
    stripes = Stripes(2, lambda: now_s)
    assert stripes.begin(4096, failed=[0]) == 1
    now_s += 1.0
    stripes.end(1, 4096)
    assert stripes.begin(READ) == 0
    assert stripes.begin(READ) == 1
    now_s += READ / 1e9
    stripes.end(0, READ)
    stripes.begin(4096, failed=[0])
    stripes.end(1, 4096)
    stripes.end(1, READ)
    assert stripes.bandwidth(0) == pytest.approx(1e9)
    assert stripes.bandwidth(1) == pytest.approx(1e9)


@pytest.mark.parametrize("length", [4096, READ])
def test_a_first_read_that_hangs_is_not_waited_for_long(length: int) -> None:
    """Before anything was measured; a slow card and a drive in standby have their time."""
    stripes = Stripes(2, lambda: 0.0)
    assert stripes.begin(length) == 0
    assert 15 + length / 1e6 <= stripes.patience_s(0) < 35


def test_once_a_drive_was_measured_no_read_is_given_time_to_start_one() -> None:
    now_s = 0.0
    stripes = Stripes(2, lambda: now_s)
    stripes.begin(READ)
    now_s = 1.0
    stripes.end(0, READ)
    assert stripes.patience_s(0) == stripes.patience_s(1) == LEAST_PATIENCE_S


def test_a_drive_that_fails_rests_for_longer_each_time() -> None:
    now_s, rests = 0.0, list[float]()
    stripes = Stripes(2, lambda: now_s)
    for _ in range(9):
        assert stripes.begin(READ, failed=[1]) == 0
        stripes.fail(0, READ)
        failed_s = now_s
        while not stripes._is_ready(0, now_s):
            chosen = stripes.begin(READ)
            assert chosen == 1
            stripes.end(1, READ)
            now_s += LEAST_REST_S / 2
        rests.append(now_s - failed_s)
    assert rests == [min(LEAST_REST_S * 2**i, MOST_REST_S) for i in range(9)]


def test_a_drive_that_worked_again_rests_shortly_when_it_fails_next() -> None:
    now_s = 0.0
    stripes = Stripes(2, lambda: now_s)
    for _ in range(4):
        stripes.begin(READ, failed=[1])
        stripes.fail(0, READ)
        now_s += MOST_REST_S
    stripes.begin(READ, failed=[1])
    stripes.end(0, READ)
    stripes.begin(READ, failed=[1])
    stripes.fail(0, READ)
    assert not stripes._is_ready(0, now_s)
    assert stripes._is_ready(0, now_s + LEAST_REST_S)


def test_nothing_more_is_read_where_a_read_hangs_unless_nothing_else_is_left() -> None:
    now_s = 0.0
    stripes = Stripes(2, lambda: now_s)
    assert stripes.begin(READ, failed=[1]) == 0
    stripes.hang(0)
    assert not stripes.is_answering(0)
    for _ in range(5):
        assert stripes.begin(READ) == 1
    assert stripes.begin(READ, failed=[1]) == 0
    assert stripes.begin(READ, failed=[0, 1]) is None
    stripes.revive(0, READ)
    assert stripes.is_answering(0)
    now_s += LEAST_REST_S
    assert stripes.begin(READ) == 0, "the other one has much to do"
