"""What a pass takes by its width, learnt from passes that were seen."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_run.partition.width_costs import REMEMBERED, WidthCosts, WidthCurve
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


@pytest.mark.parametrize(("slow", "true"), [(6, 4.0), (1, 2.0)])
def test_a_slow_pass_between_others_is_forgotten(slow: int, true: float) -> None:
    curve = WidthCurve()
    for width, value in ((2, 2.0), (4, 3.0), (8, 5.0), (slow, 9.0)):
        for _ in range(1 if width == slow else 4):
            curve.observe(width, value)
    for i in range(REMEMBERED + 1):
        assert (curve.at(slow) == 9.0) == (slow in curve) == (i <= REMEMBERED)
        curve.observe(2, 2.0)
    assert slow not in curve
    assert curve.at(slow) == pytest.approx(true)


@pytest.mark.parametrize("times", [1, 2])
def test_what_was_seen_of_prompts_stays_however_long_the_answer(times: int) -> None:
    costs, widths = WidthCosts(), (64, 512, 13)
    for width in widths:
        for _ in range(times):
            costs.observe(width, *resident(width))
    before = [costs.pass_s(width) for width in widths]
    for _ in range(4 * REMEMBERED):
        costs.observe(1, *resident(1))
    assert [costs.pass_s(width) for width in widths] == before
    assert costs.widest == 512


def test_a_slow_pass_is_forgotten_though_an_older_one_stays() -> None:
    """A width of few values that does not stand out does not stand before the others."""
    curve = WidthCurve()
    for width, value in ((512, 40.0), (4, 2.0), (4, 2.0), (4, 2.0), (4, 2.0), (8, 900.0)):
        curve.observe(width, value)
    for _ in range(REMEMBERED + 2):
        curve.observe(1, 1.0)
    assert (512 in curve, 8 in curve) == (True, False)


def test_bytes_that_narrow_passes_find_in_memory_say_nothing_of_wide_ones() -> None:
    costs = WidthCosts()
    costs.observe(512, 9.0, 3.0, 6.0, 10**9)
    before = costs.pass_s(512)
    for _ in range(2 * REMEMBERED):
        costs.observe(1, 1.0, 0.0, 0.0, 0)
    assert costs.pass_s(512) == before


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
