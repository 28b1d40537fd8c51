"""What a GPU's driver took while an engine opened counts in the budget."""

from __future__ import annotations

import pytest

from edge_run.base.errors import BudgetError
from edge_run.base.units import MIB
from edge_run.runtime.decoding.driver import PassShape
from edge_run.runtime.decoding.warm_up import check_peak, usual_passes


def test_an_opening_that_held_more_than_the_budget_is_refused_with_what_works() -> None:
    with pytest.raises(BudgetError, match="raise memory= to 301MiB or more, or leave out gpu_memory=") as refused:
        check_peak(200 * MIB, 300 * MIB + 1, 290 * MIB)
    assert refused.value.minimum_bytes == 301 * MIB
    check_peak(200 * MIB, 300 * MIB + 1, 301 * MIB)


def test_what_was_held_before_is_not_the_drivers() -> None:
    check_peak(300 * MIB, 300 * MIB, 100 * MIB)


def test_passes_of_many_widths_are_computed_where_that_is_quick() -> None:
    """llama.cpp has kernels for each width up to 8, and from there on for each 8."""
    quick = usual_passes(512, is_software=False)
    assert [one.tokens for one in quick[:9]] == [1, 2, 3, 4, 5, 6, 7, 8, 16]
    assert quick[-2:] == [PassShape(128, 128), PassShape(512, 512)]
    assert usual_passes(512, is_software=True) == [PassShape(1, 1), PassShape(512, 1)]
    assert [one.tokens for one in usual_passes(4, is_software=False)] == [1, 2, 3, 4]
    assert usual_passes(1, is_software=True) == [PassShape(1, 1)]
