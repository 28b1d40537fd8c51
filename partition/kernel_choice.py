"""Which of two kernels computes the weights of a kind: a pure decision from their measured speeds.

Which kernel is used belongs to the numerics key, so that it must not hang on the weather: what was chosen before stays
unless the other one gains more than a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from edge_run.base.profile import KernelSpeed

LEAST_GAIN = 1.1


def is_repacking_worth_it(
    plain: Sequence[KernelSpeed],
    repacked: Sequence[KernelSpeed],
    widths: Collection[int],
    was_repacked: bool | None = None,
) -> bool | None:
    """Return whether repacked weights of one kind are better for passes of `widths` tokens.

    plain, repacked: the speeds of the two kernels.
    was_repacked: what was chosen before; None where nothing was.

    A kernel is better where it gains more than a tenth at one width and loses more than a tenth at none. Where neither
    is, what was chosen before stays. None where no width was measured with both.
    """
    gains = _gains(plain, repacked, widths)
    if not gains:
        return was_repacked
    if _is_better(gains):
        return True
    if _is_better([1 / gain for gain in gains]):
        return False
    return bool(was_repacked)


def _is_better(gains: Iterable[float]) -> bool:
    gains = list(gains)
    return max(gains) > LEAST_GAIN and min(gains) >= 1 / LEAST_GAIN


def _gains(plain: Sequence[KernelSpeed], repacked: Sequence[KernelSpeed], widths: Collection[int]) -> list[float]:
    """Return how many times as fast repacked weights are, at the measured widths that are nearest to `widths`."""
    before, after = _by_tokens(plain), _by_tokens(repacked)
    measured = sorted(before.keys() & after.keys())
    near = {min(measured, key=lambda tokens: abs(math.log(tokens / width))) for width in widths} if measured else set()
    return [after[tokens] / before[tokens] for tokens in near]


def _by_tokens(kernels: Sequence[KernelSpeed]) -> Mapping[int, float]:
    return {kernel.tokens: kernel.bytes_per_s for kernel in kernels}
