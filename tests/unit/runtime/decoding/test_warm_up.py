"""What a GPU's driver took while an engine opened counts in the budget."""

from __future__ import annotations

import pytest

from edge_run.base.errors import BudgetError
from edge_run.base.units import MIB
from edge_run.runtime.decoding.warm_up import check_peak


def test_an_opening_that_held_more_than_the_budget_is_refused_with_what_works() -> None:
    with pytest.raises(BudgetError, match="raise --memory to 301MiB") as refused:
        check_peak(200 * MIB, 300 * MIB + 1, 290 * MIB)
    assert refused.value.minimum_bytes == 301 * MIB
    check_peak(200 * MIB, 300 * MIB + 1, 301 * MIB)


def test_what_was_held_before_is_not_the_drivers() -> None:
    check_peak(300 * MIB, 300 * MIB, 100 * MIB)
