"""Lines through what was seen."""

from __future__ import annotations

import pytest

from edge_run.runtime.learned import Line, line_through

MOST = 1e-9


@pytest.mark.parametrize(
    ("seen", "line"),
    [
        ([(1e8, 0.03), (3e8, 0.05)], Line(0.02, 1e-10)),
        ([(1e8, 0.03), (2e8, 0.04), (3e8, 0.05)], Line(0.02, 1e-10)),
        ([(1e8, 0.05)], Line(0.0, 5e-10)),
        ([(1e7, 0.05)], Line(0.04, MOST)),  # one point: what goes with bytes does not take long
        ([(0, 0.05)], Line(0.05, MOST)),
        ([(1.1e8, 0.05), (1e8, 0.07)], Line(0.0, 0.06 / 1.05e8)),  # too much alike
        ([(1e8, 0.05), (2e8, 0.03)], Line(0.04, 0.0)),  # fewer bytes do not take longer
        ([(1e8, 0.01), (2e8, 0.05)], Line(0.0, 0.03 / 1.5e8)),  # and none do not give time back
        ([(1e8, 0.0), (2e8, 0.0)], Line(0.0, 0.0)),
    ],
)
def test_a_line_has_no_part_below_zero(seen: list[tuple[float, float]], line: Line) -> None:
    assert line_through(seen, MOST) == pytest.approx(line, abs=1e-12)


def test_a_line_says_what_bytes_take() -> None:
    assert Line(0.02, 1e-10).at(1e8) == pytest.approx(0.03)
