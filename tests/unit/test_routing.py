"""How evenly a mixture chooses: what runs leave behind, and what is made of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_run.runtime import routing
from edge_run.tiers.gguf import read_gguf
from kit_models import KIT

ENOUGH = routing.LEAST_LOOK_UPS


def test_without_runs_experts_are_taken_to_be_chosen_evenly() -> None:
    assert [routing.hit_rate([], share) for share in (-0.1, 0.0, 0.3, 1.0, 1.4)] == [0, 0, pytest.approx(0.3), 1, 1]


def test_a_point_is_met_and_others_follow_from_it() -> None:
    points = [(0.5, 0.7), (0.1, 0.3)]
    assert routing.hit_rate(points, 0.5) == pytest.approx(0.7)
    assert routing.hit_rate(points, 0.1) == pytest.approx(0.3)
    rates = [routing.hit_rate(points, share / 50) for share in range(51)]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (0, 1)


def test_what_was_found_is_kept_under_the_file(tmp_path: Path) -> None:
    gguf = read_gguf(KIT)
    routing.remember(gguf, tmp_path, 0.25, ENOUGH, ENOUGH // 2)
    routing.remember(gguf, tmp_path, 0.5, 2 * ENOUGH, ENOUGH)
    routing.remember(gguf, tmp_path, 0.26, 3 * ENOUGH, ENOUGH)  # instead of the first
    assert routing.recall(gguf, tmp_path) == [(0.5, 0.5), (0.26, pytest.approx(1 / 3))]


@pytest.mark.parametrize(("share", "look_ups", "hits"), [(0.3, ENOUGH - 1, 9), (0.3, ENOUGH, 0), (1.0, ENOUGH, 9)])
def test_what_tells_nothing_is_not_kept(tmp_path: Path, share: float, look_ups: int, hits: int) -> None:
    routing.remember(read_gguf(KIT), tmp_path, share, look_ups, hits)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_broken_or_cannot_be_written(tmp_path: Path) -> None:
    gguf = read_gguf(KIT)
    routing.remember(gguf, tmp_path, 0.25, ENOUGH, 9)
    (known,) = (tmp_path / "routing").iterdir()
    for text in ("", "[[1]]", '[["a", 1]]', "7", "null"):
        known.write_text(text)
        assert routing.recall(gguf, tmp_path) == []
    os.replace(known, tmp_path / "file")
    routing.remember(gguf, tmp_path / "file", 0.25, ENOUGH, 9)
    assert (tmp_path / "file").read_text() == "null"
