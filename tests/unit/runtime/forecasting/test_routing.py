"""How evenly routers choose: what runs leave behind, and what is made of it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_run.runtime.forecasting import routing
from edge_run.tiers.gguf import read_gguf
from edge_run.tiers.readers import ReadTotals
from kit_models import KIT


def test_without_runs_experts_are_taken_to_be_chosen_evenly() -> None:
    assert [routing.hit_rate([], share) for share in (-0.1, 0.0, 0.3, 1.0, 1.4)] == [0, 0, pytest.approx(0.3), 1, 1]


def test_a_point_is_met_and_others_follow_from_it() -> None:
    points = [routing.Point(0.5, 0.7, routing.PassSeen()), routing.Point(0.1, 0.3, routing.PassSeen())]
    assert routing.hit_rate(points, 0.5) == pytest.approx(0.7)
    assert routing.hit_rate(points, 0.1) == pytest.approx(0.3)
    rates = [routing.hit_rate(points, share / 50) for share in range(51)]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (0, 1)


class Drive:
    """Readers, and the experts that they read, as far as they count."""

    def __init__(self) -> None:
        self.totals, self.read_bytes = ReadTotals(), 0

    def read(self, n_bytes: int, other_bytes: int = 0) -> None:
        self.read_bytes += n_bytes
        self.totals = ReadTotals(self.totals.bytes_read + n_bytes + other_bytes, self.totals.busy_s + 0.2)


WIDTH = 64


def usage(share: float, rate: float, n_tokens: int = routing.LEAST_TOKENS) -> routing.Usage:
    """Two prompts of two full passes and a rest, and tokens after the second, the last of which is held up."""
    drive = Drive()
    now, wait_s, choosing_s = 0.0, 0.0, 0.0
    found = routing.Usage(share, 1000, drive, drive, lambda: now)  # type: ignore[arg-type]
    for width in [WIDTH, WIDTH, 8, WIDTH, WIDTH, 8, *[1] * n_tokens, 2]:
        found.begin(width, wait_s, choosing_s)
        drive.read(round(1000 * (1 - rate)) if width == 1 else 50 * width)
        now, wait_s, choosing_s = now + (0.25 if width == 1 else 3.0), wait_s + 0.125, choosing_s + 0.0625
    return found


def test_what_tokens_read_is_counted_and_what_prompts_read_is_not() -> None:
    found = usage(0.5, 0.7, 20)
    assert (found.n_tokens, found.hit_rate) == (20, pytest.approx(0.7))
    assert usage(0.5, 0.7, 0).hit_rate == 0


def test_who_reads_more_than_is_used_had_nothing_in_memory() -> None:
    """What is predicted in vain is read too: that is no share below zero."""
    assert usage(0.5, -0.4).hit_rate == 0


def test_keys_and_values_that_are_read_back_are_no_experts() -> None:
    """Neither their bytes nor the wait for them."""
    drive, now, spill = Drive(), [0.0], SimpleNamespace(wait_s=0.0, awaited_bytes=0)
    found = routing.Usage(0.5, 1000, drive, drive, lambda: now[0])  # type: ignore[arg-type]
    found.spilled = spill  # type: ignore[assignment]
    for _ in range(routing.LEAST_TOKENS + 1):
        found.begin(1, 0.0, 0.0)
        drive.read(400, other_bytes=5000)
        spill.wait_s += 0.5
        spill.awaited_bytes += 5000
        now[0] += 0.75
    assert found.hit_rate == pytest.approx(0.6)
    assert found.point is not None
    assert found.point.token[:3] == pytest.approx((1, 400, 0.25))


def test_a_token_that_waited_for_a_question_does_not_count() -> None:
    drive, now = Drive(), [0.0]
    found = routing.Usage(0.5, 1000, drive, drive, lambda: now[0])  # type: ignore[arg-type]
    for i in range(2 * routing.LEAST_TOKENS + 1):
        found.begin(1, 0.0, 0.0)
        drive.read(400)
        now[0] += 60.0 if i % 4 == 3 else 0.25
    assert found.point is not None
    assert found.point.token.wall_s == pytest.approx(0.25)


def test_what_was_found_is_kept_under_the_file(tmp_path: Path) -> None:
    gguf = read_gguf(KIT)
    for share, rate in ((0.25, 0.5), (0.5, 0.6), (0.26, 0.4)):  # the last instead of the first
        routing.remember(gguf, tmp_path, usage(share, rate), {"prefetch": str(share)})
    routing.remember(gguf, tmp_path, usage(0.5, 0.6), {"readers": "2"})
    known = routing.recall(gguf, tmp_path)
    batch = routing.PassSeen(WIDTH, 50 * WIDTH, 3.0, 0.125, 0.0625, 0.2)
    for point, share, rate in zip(known.points, (0.26, 0.5), (0.4, 0.6), strict=True):
        assert point[:2] == pytest.approx((share, rate))
        assert point.token == pytest.approx((1, 1000 * (1 - rate), 0.25, 0.125, 0.0625, 0.2))
        assert point.first == pytest.approx(batch)
        assert point.batch == pytest.approx(batch)
    assert known.tunables == {"prefetch": "0.26", "readers": "2"}


@pytest.mark.parametrize(
    ("share", "rate", "n_tokens"), [(0.3, 0.4, routing.LEAST_TOKENS - 1), (0.3, 0.0, 99), (1.0, 0.4, 99), (0.3, 1, 99)]
)
def test_what_tells_nothing_is_not_kept(tmp_path: Path, share: float, rate: float, n_tokens: int) -> None:
    routing.remember(read_gguf(KIT), tmp_path, usage(share, rate, n_tokens), {})
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_broken_or_cannot_be_written(tmp_path: Path) -> None:
    gguf = read_gguf(KIT)
    routing.remember(gguf, tmp_path, usage(0.25, 0.5), {})
    (known,) = (tmp_path / "routing").iterdir()
    for text in (
        "",
        "[[1]]",
        '{"points": [["a", 1]], "tunables": {}}',
        '{"points": [[0.5, 0.5, 1.0, 1.0, 1.0, 1.0]], "tunables": {}}',
        '{"points": [[0.5, 0.5, [1, 1, 1, 1, 1, 1, 1], [], []]], "tunables": {}}',
        '{"points": []}',
        '{"points": [], "tunables": 3}',
        "7",
        "null",
    ):
        known.write_text(text)
        assert routing.recall(gguf, tmp_path) == routing.Experience()
    os.replace(known, tmp_path / "file")
    routing.remember(gguf, tmp_path / "file", usage(0.25, 0.5), {})
    assert (tmp_path / "file").read_text() == "null"


def test_a_model_file_that_is_gone_by_the_time_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(KIT.read_bytes())
    gguf = read_gguf(path)
    path.unlink()
    routing.remember(gguf, tmp_path, usage(0.25, 0.5), {})
    assert routing.recall(gguf, tmp_path) == routing.Experience()
    assert list(tmp_path.iterdir()) == []
