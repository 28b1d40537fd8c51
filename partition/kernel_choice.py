"""Which of two kernels computes the weights of a kind: a pure decision from their measured speeds.

Which kernel is used belongs to the numerics key, so that it must not hang on the weather: what was chosen before stays
unless the other one gains more than a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from edge_run.base.profile import KernelSpeed, RepackedSpeed
from edge_run.partition.cost import overlapped_s

LEAST_GAIN = 1.1
SHARE_STEPS = 4  # of what streams: a decision is not to hang on a few MB more of a budget


@dataclass(frozen=True, slots=True)
class Streaming:
    """How weights come that have no room.

    share: how much of them each pass reads, above 0 and at most 1.
    drive_byte_s: what the drive takes for a byte; 0 where that was not measured, as if nothing had to be read.
    """

    share: float
    drive_byte_s: float = 0.0

    @classmethod
    def under(cls, budget_bytes: int, model_bytes: int, drive_byte_s: float = 0.0) -> Streaming:
        """Return how a model of `model_bytes` streams in a budget, with its share in a few steps."""
        steps = math.ceil(SHARE_STEPS * (1 - budget_bytes / model_bytes))
        return cls(min(SHARE_STEPS, max(1, steps)) / SHARE_STEPS, drive_byte_s)

    def speed(self, kernel: KernelSpeed) -> KernelSpeed:
        """Return the speed of `kernel` in passes that read its weights beside computing with them.

        Repacking takes the time of cores that compute, as where no core is idle, and the time of readers, which read
        nothing meanwhile.
        """
        repack_byte_s = 1 / kernel.repacked_bytes_per_s if isinstance(kernel, RepackedSpeed) else 0.0
        reading_byte_s = self.share * (self.drive_byte_s + repack_byte_s)
        busy_byte_s = 1 / kernel.bytes_per_s + self.share * repack_byte_s
        return replace(kernel, bytes_per_s=1 / overlapped_s(reading_byte_s, busy_byte_s))


def is_repacking_worth_it(
    plain: Sequence[KernelSpeed],
    repacked: Sequence[KernelSpeed],
    widths: Collection[int],
    was_repacked: bool | None = None,
    *,
    parallel: int = 1,
) -> bool | None:
    """Return whether repacked weights of one kind are better for passes of `widths` tokens, the widest for prompts.

    plain, repacked: the speeds of the two kernels.
    was_repacked: what was chosen before; None where nothing was.
    parallel: the answers that share a pass, with a token each.

    A kernel is better where it gains more than a tenth at one width and loses more than a tenth at none. Where each
    gains at another width, it is the one that takes more than a tenth less for answers as long as their prompts. Where
    neither is, what was chosen before stays, at first the one that answers faster by more than a tenth, or else plain
    weights. None where no width was measured with both.
    """
    before, after = _by_tokens(plain), _by_tokens(repacked)
    measured = sorted(before.keys() & after.keys())
    if not measured:
        return was_repacked

    def nearest(width: int) -> int:
        return min(measured, key=lambda tokens: abs(math.log(tokens / width)))

    gains = [after[tokens] / before[tokens] for tokens in {nearest(width) for width in (*widths, parallel)}]
    if max(gains) > LEAST_GAIN and min(gains) < 1 / LEAST_GAIN:
        of_both = (nearest(parallel), nearest(max(widths)))
        gains = [sum(1 / (n * before[n]) for n in of_both) / sum(1 / (n * after[n]) for n in of_both)]
    if _is_better(gains):
        return True
    if _is_better([1 / gain for gain in gains]):
        return False
    at = nearest(parallel)
    return after[at] / before[at] > LEAST_GAIN if was_repacked is None else was_repacked


def _is_better(gains: Collection[float]) -> bool:
    return max(gains) > LEAST_GAIN and min(gains) >= 1 / LEAST_GAIN


def _by_tokens(kernels: Sequence[KernelSpeed]) -> Mapping[int, float]:
    return {kernel.tokens: kernel.bytes_per_s for kernel in kernels}
