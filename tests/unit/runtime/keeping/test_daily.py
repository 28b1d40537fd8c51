"""What may be written to a prompt cache in a day."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from edge_run.runtime.keeping.daily import WRITTEN, DailyWrites


def test_a_day_has_an_end_and_another_one_follows(tmp_path: Path) -> None:
    today = date(2026, 3, 1)
    daily, other = (DailyWrites(tmp_path, 100, lambda: today) for _ in range(2))
    assert [daily.take(60), other.take(50), other.take(40), daily.take(1)] == [True, False, True, False]
    assert daily.written_bytes == 100
    today = date(2026, 3, 2)
    assert daily.written_bytes == 0
    assert daily.take(100)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"day": "2026-03-01"}', '{"day": "2026-03-01", "bytes": "x"}', "{}"])
def test_a_note_that_is_half_counts_as_none(text: str, tmp_path: Path) -> None:
    (tmp_path / WRITTEN).write_text(text)
    daily = DailyWrites(tmp_path, 100, lambda: date(2026, 3, 1))
    assert daily.written_bytes == 0
    assert daily.take(100)


def test_what_is_noted_at_midnight_is_of_one_day(tmp_path: Path) -> None:
    """The sum of a day that has ended is none of the next one's."""
    before, after = date(2026, 3, 1), date(2026, 3, 2)
    assert DailyWrites(tmp_path, 100, lambda: before).take(90)
    looks = iter([before])
    daily = DailyWrites(tmp_path, 100, lambda: next(looks, after))
    assert daily.take(10)
    assert daily.written_bytes == 0
    assert daily.take(100)
