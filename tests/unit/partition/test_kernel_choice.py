"""Which of two kernels computes weights: only a gain of more than a tenth counts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from edge_run.base.profile import KernelSpeed
from edge_run.partition.kernel_choice import is_repacking_worth_it


def speeds(by_tokens: Mapping[int, float]) -> list[KernelSpeed]:
    return [KernelSpeed("Q4_0", 4096, tokens, 2, False, speed) for tokens, speed in by_tokens.items()]


@pytest.mark.parametrize(
    ("token_gain", "prompt_gain", "before", "wanted"),
    [
        (1.0, 2.0, None, True),
        (1.0, 2.0, False, True),
        (0.95, 2.0, None, True),
        (1.0, 1.05, None, False),
        (1.0, 1.05, True, True),
        (1.0, 0.95, True, True),
        (1.0, 0.5, True, False),
        (1.0, 0.5, None, False),
        (0.5, 2.0, None, False),
        (0.5, 2.0, True, True),
        (0.5, 2.0, False, False),
    ],
)
def test_gains(token_gain: float, prompt_gain: float, before: bool | None, wanted: bool) -> None:
    plain, repacked = speeds({1: 1.0, 512: 1.0}), speeds({1: token_gain, 512: prompt_gain})
    assert is_repacking_worth_it(plain, repacked, [1, 512], before) is wanted


def test_the_nearest_measured_width_counts() -> None:
    plain, repacked = speeds({1: 1.0, 8: 1.0, 64: 1.0}), speeds({1: 1.0, 8: 0.5, 64: 2.0})
    assert is_repacking_worth_it(plain, repacked, [1, 512]) is True
    assert is_repacking_worth_it(plain, repacked, [1, 10, 512]) is False


def test_without_figures_of_both_what_was_chosen_stays() -> None:
    some = speeds({1: 1.0})
    for plain, repacked in ((some, []), ([], some), (some, speeds({8: 9.0}))):
        assert is_repacking_worth_it(plain, repacked, [1]) is None
        assert is_repacking_worth_it(plain, repacked, [1], was_repacked=True) is True
