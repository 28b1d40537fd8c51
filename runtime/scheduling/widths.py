"""How many tokens a pass may have when some requests make tokens and others have their prompts read. Pure.

Over streamed weights a pass reads the same for one token as for many, so a prompt's tokens ride along for nothing as
long as they are computed while the weights are read (chunked prefill: Agrawal et al., SARATHI, 2023). Where computing
takes longer they cost what they cost, and a prompt gets as many as keep the time between tokens even. It always gets
`RIDING_TOKENS`: kernels compute fewer hardly faster, and weights are lent the same room beside them.
"""

from __future__ import annotations

from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.llama.context_shape import RIDING_TOKENS

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # of passes with prompts in them
RIDING = 1.1  # over a pass without prompts: one with them takes up to this where passes wait for the drive
EVEN = 1.5  # up to this where they do not


class PassWidths:
    """Decides how wide passes are, from what earlier ones took.

    most_tokens: that a pass can have.
    """

    def __init__(self, costs: WidthCosts, most_tokens: int) -> None:
        self._costs, self.most_tokens = costs, most_tokens

    def observe(self, width: int, wall_s: float, wait_s: float, read_s: float, read_bytes: int) -> None:
        """Note a pass; see `WidthCosts.observe`."""
        self._costs.observe(width, wall_s, wait_s, read_s, read_bytes)

    def expected_s(self, width: int) -> float | None:
        """Return the seconds that a pass is expected to take; None before one was seen."""
        return self._costs.pass_s(width) if self._costs.is_known else None

    def with_prompts(self, n_answers: int) -> int:
        """Return how many tokens a pass may have in which `n_answers` requests make one each, and prompts are read."""
        if not n_answers:
            return self.most_tokens
        least = min(self.most_tokens, n_answers + RIDING_TOKENS)
        if not self._costs.is_known:
            return least
        longest = RIDING if self._costs.is_read_bound(n_answers) else EVEN
        return max(least, self._widest(n_answers, longest * self._costs.pass_s(n_answers)))

    def _widest(self, n_answers: int, most_s: float) -> int:
        widths = [width for width in WIDTHS if n_answers < width <= self.most_tokens]
        fitting = (width for width in reversed(widths) if self._costs.is_within_reach(width))
        return next((width for width in fitting if self._costs.pass_s(width) <= most_s), n_answers)
