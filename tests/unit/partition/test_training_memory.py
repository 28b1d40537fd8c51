"""What a training may do within its budget."""

from __future__ import annotations

import pytest

from edge_run.base.errors import BudgetError
from edge_run.partition.training_memory import TrainingSizes, plan_training

SIZES = TrainingSizes(fixed=1000, image=100, latents=10, sample=500, kept=2000)


@pytest.mark.parametrize("budget", [1200, 1234, 2000, 4000, 9000, 100_000])
def test_all_that_is_done_fits_into_the_budget(budget: int) -> None:
    found = plan_training("model", budget, 16, SIZES)
    assert 2 <= found.at_once <= 16
    assert found.sample_bytes >= SIZES.latents
    assert 0 <= found.kept_bytes <= 2000
    for at_a_time in (found.at_once * SIZES.image, 6 * found.sample_bytes):
        assert SIZES.fixed + found.kept_bytes + at_a_time <= found.needed_bytes <= budget


def test_with_room_for_all_nothing_is_left_out() -> None:
    found = plan_training("model", 1 << 30, 16, SIZES)
    assert (found.at_once, found.sample_bytes, found.kept_bytes) == (16, 500, 2000)
    assert found.needed_bytes == 1000 + 2000 + 6 * 500


def test_the_smallest_budget_that_works_is_named() -> None:
    for sizes, least in ((SIZES, 1200), (TrainingSizes(1000, 100, 50, 500, 2000), 1300)):
        with pytest.raises(BudgetError, match="model: training takes") as found:
            plan_training("model", least - 1, 16, sizes)
        assert found.value.minimum_bytes == least
        assert plan_training("model", least, 16, sizes).needed_bytes == least
