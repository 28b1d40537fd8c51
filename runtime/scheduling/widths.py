"""How many tokens a pass may have when some requests make tokens and others have their prompts read. Pure.

Over streamed weights a pass reads the same for one token as for many, so a prompt's tokens ride along for nothing as
long as they are computed while the weights are read (chunked prefill: Agrawal et al., SARATHI, 2023). Where computing
takes longer they cost what they cost, and a prompt gets as many as keep the time between tokens even. It always gets
`PART_TOKENS`: kernels compute fewer hardly faster. Where more prompts are to be read than answers go on, more requests
wait for their first token than for their next, and passes are wider for them. Prompts that end with a pass may make it
longer, since they do so once; up to `RIDING_TOKENS` of them, beside which weights are lent the same room.
"""

from __future__ import annotations

from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.llama.context_shape import RIDING_TOKENS

PART_TOKENS = 32  # of prompts, at least, in a pass in which answers go on
WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # of passes with prompts in them
RIDING = 1.1  # over a pass without prompts: one with them takes up to this where passes wait for the drive
EVEN = 1.5  # up to this where they do not, or where more requests have prompts to be read than make tokens
ENDING = 1.75  # up to this with prompts that end, which would take a pass more in parts: a pass for two


class PassWidths:
    """Decides how wide passes are, from what earlier ones took.

    most_tokens: that a pass can have.
    """

    def __init__(self, costs: WidthCosts, most_tokens: int) -> None:
        self._costs, self.most_tokens = costs, most_tokens

    def observe(self, width: int, wall_s: float, wait_s: float, read_s: float, read_bytes: int) -> None:
        """Note a pass; see `WidthCosts.observe`."""
        self._costs.observe(width, wall_s, wait_s, read_s, read_bytes)

    def with_prompts(self, n_answers: int, *, are_few: bool = False) -> int:
        """Return how many tokens a pass may have in which `n_answers` requests make one each, and prompts are read.

        are_few: there are fewer such requests than prompts to be read.
        Where answers leave hardly any room these are more than a pass can have, and it is computed as several.
        """
        if not n_answers:
            return self.most_tokens
        part, room = min(PART_TOKENS, self.most_tokens), self.most_tokens - n_answers
        if room < max(1, part // 4):
            room = part  # for a prompt in tiny parts all passes would be more than twice as many
        least = n_answers + min(part, room)
        if not self._costs.is_known:
            return least
        longest = EVEN if are_few or not self._costs.is_read_bound(n_answers) else RIDING
        return max(least, self._widest(n_answers, longest * self._costs.pass_s(n_answers)))

    def may_end_prompts(self, n_answers: int, n_tokens: int) -> bool:
        """Return whether a pass may have `n_tokens` where the prompts in it end, and that many requests make tokens."""
        if n_tokens > min(self.most_tokens, n_answers + RIDING_TOKENS) or not self._costs.is_known:
            return False
        return self._is_tolerable(n_tokens, ENDING * self._costs.pass_s(n_answers))

    def _widest(self, n_answers: int, most_s: float) -> int:
        widths = [width for width in WIDTHS if n_answers < width <= self.most_tokens]
        return next((width for width in reversed(widths) if self._is_tolerable(width, most_s)), n_answers)

    def _is_tolerable(self, width: int, most_s: float) -> bool:
        return self._costs.is_within_reach(width) and self._costs.pass_s(width) <= most_s
