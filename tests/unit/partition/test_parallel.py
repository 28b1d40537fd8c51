"""The number of answers at once is about as good as the best of all numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from edge_run.partition.parallel import LEAST_GAIN, most_productive


def pass_of(read_s: float, first_s: float, more_s: float, displaced_s: float = 0.0) -> Callable[[int], float]:
    """Return the tokens a second of passes that read and compute, where each answer displaces weights."""

    def tokens_per_s(number: int) -> float:
        compute_s = first_s + more_s * (number - 1)
        return number / math.hypot((read_s + displaced_s * number) ** 2, compute_s**2) ** 0.5

    return tokens_per_s


@pytest.mark.parametrize("most", [1, 5, 16, 100, 256])
@pytest.mark.parametrize(
    "tokens_per_s",
    [
        pass_of(5.0, 0.12, 0.0565, 0.06),  # 7B, half in memory, 500 MB/s
        pass_of(1.0, 0.12, 0.0565, 0.012),  # the same drive without a limit
        pass_of(0.0, 0.5, 0.14),  # all in memory
        pass_of(0.0, 0.5, 0.6),  # kernels that several tokens do not help
        pass_of(2.0, 0.1, 0.01, 2.0),  # next to no room for keys and values
        lambda number: number if number <= 24 else 0.0,  # no room for more
    ],
)
def test_against_all_numbers(tokens_per_s: Callable[[int], float], most: int) -> None:
    best = max(tokens_per_s(number) for number in range(1, most + 1))
    chosen = most_productive(tokens_per_s, most)
    assert 1 <= chosen <= most
    between = 1.05  # the best number may lie between two that are tried
    assert tokens_per_s(chosen) * LEAST_GAIN * between >= best


def test_no_more_than_pays() -> None:
    assert most_productive(lambda number: 10.0, 256) == 1
    assert most_productive(lambda number: min(number, 8.1), 256) == 8
    assert most_productive(float, 256) == 256
