"""What a pass takes by its width, learnt from passes that were seen."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_run.partition.width_costs import REMEMBERED, WidthCosts
from pass_times import resident, streamed


def test_costs_between_widths_that_were_seen_lie_on_a_line() -> None:
    costs = WidthCosts()
    for width in (1, 9):
        costs.observe(width, *resident(width))
    assert costs.pass_s(5) == pytest.approx(resident(5)[0])
    assert costs.pass_s(17) == pytest.approx(resident(17)[0], rel=0.01)


def test_reading_hides_computing_at_widths_that_were_not_seen() -> None:
    costs = WidthCosts()
    for width in (1, 4):
        costs.observe(width, *streamed(width))
    assert costs.pass_s(16) == pytest.approx(4.0, rel=0.05)
    assert costs.pass_s(64) == pytest.approx(streamed(64)[0], rel=0.1)


def test_reading_grows_with_the_union_of_experts() -> None:
    def union(width: int) -> float:
        return float((1 - 0.875**width) / 0.125)

    costs = WidthCosts(union)
    costs.observe(1, 1.0, 0.9, 1.0, 10**9)
    assert costs.pass_s(8) == pytest.approx(union(8), rel=0.02)


def test_one_slow_pass_does_not_count() -> None:
    costs = WidthCosts()
    for wall_s in (1.0, 1.0, 9.0, 1.0):
        costs.observe(1, wall_s, 0.0, 0.0, 0)
    assert costs.pass_s(1) == 1.0


def test_a_slow_pass_of_a_width_that_is_not_taken_for_it_is_forgotten() -> None:
    """Nothing else could set it right: the width is not taken any more."""
    costs = WidthCosts()
    for width in (1, 4, 4, 4, 4, 8, 8):
        costs.observe(width, *resident(width))
    costs.observe(8, 100.0, 0.0, 0.0, 0)
    for _ in range(REMEMBERED):
        costs.observe(1, *resident(1))
    assert costs.pass_s(8) > 10
    costs.observe(1, *resident(1))
    assert costs.pass_s(8) == pytest.approx(resident(8)[0], rel=0.1)
    assert costs.widest == 4, "which was seen often enough"


def test_a_drive_that_got_slower_is_known_for_all_widths() -> None:
    """A byte takes longer in large batches, here by a quarter: that is no change of the drive's."""
    costs = WidthCosts()
    for pace in (1.0, 2.0):
        for width in (1, 8) if pace == 1 else (8,) * 8:
            read_s = pace * (1.0 if width == 1 else 1.25)
            costs.observe(width, read_s, read_s - 0.4, read_s, 10**9)
    assert costs.pass_s(1) == pytest.approx(2.0, rel=0.05)
    assert costs.pass_s(8) == pytest.approx(2.5, rel=0.05)
    assert costs.pass_s(4) == pytest.approx(2.0 + 0.5 * 3 / 7, rel=0.05)


@given(st.integers(0, 10**9))
def test_noise_does_not_let_the_costs_of_plain_passes_wander_off(seed: int) -> None:
    chance, costs = random.Random(seed), WidthCosts()
    for number in range(300):
        width = 1 if number in (0, 8, 40, 136, 232) else 12
        read_s = chance.gauss(1, 0.03) * (1.0 if width == 1 else 1.25)
        costs.observe(width, read_s, read_s - 0.2, read_s, 10**9)
    assert costs.pass_s(1) == pytest.approx(1.0, rel=0.15)


def test_a_wide_pass_whose_reads_come_late_says_nothing_of_narrow_ones() -> None:
    """A drive that waits for the processor delivers in bursts, and what was in flight for a moment is not its pace."""
    costs = WidthCosts()
    costs.observe(1, 6.7, 5.4, 6.5, 34 * 10**8)
    costs.observe(48, 8.4, 0.0, 2.2, 34 * 10**8)
    assert costs.pass_s(1) == pytest.approx(6.7, rel=0.05)
