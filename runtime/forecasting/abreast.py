"""How many answers at once a plan is good for: the number that is forecast to make the most tokens a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edge_run.base.config import REQUEST_TOKENS
from edge_run.base.results import Plan
from edge_run.partition.parallel import NUMBERS, most_productive
from edge_run.runtime.forecasting.pass_bytes import read_bytes_at

USUAL_PARALLEL = 16  # where nothing was measured, and each pass reads and computes the same weights
MOST_UNMEASURED = 64  # of a mixture, where only what is read is known


class Abreast:
    """The passes of many answers under one plan."""

    def __init__(
        self,
        plan: Plan,
        pass_s: Callable[[Plan, int, int], float],
        answer_bytes: int,
        planned: int = 1,
        most: int = NUMBERS[-1],
        hoped_bytes: int = 0,
        request_tokens: int = REQUEST_TOKENS,
    ) -> None:
        """pass_s: the seconds of a plan's pass, for how many answers, each with so many tokens.

        answer_bytes: what each answer takes besides what grows with its text: logits, and recurrent state.
        planned: for how many the plan is. most: how many may be chosen.
        hoped_bytes: what one answer alone may read less than the plan says; several are to be faster also then.
        request_tokens: what each request has in the end, prompt and answer.
        """
        self._plan, self._pass_s, self._planned, self._most = plan, pass_s, planned, most
        self._answer_bytes, self._hoped_bytes, self._request_tokens = answer_bytes, hoped_bytes, request_tokens

    @property
    def best(self) -> int:
        """How many at once make the most tokens a second."""
        plan = self._plan
        most = max(USUAL_PARALLEL, plan.context_tokens // self._request_tokens)
        return most_productive(self.tokens_per_s, min(most, plan.micro_batch_tokens, self._most))

    def tokens_per_s(self, number: int) -> float:
        """Return the tokens a second of `number` answers at once, half of whose text is there; 0 without room."""
        plan, position = self._plan, min(self._request_tokens, self._plan.context_tokens // number) // 2
        taken = (number - self._planned) * self._answer_bytes
        more = read_bytes_at(plan, number * position) - plan.streamed_bytes_per_pass
        if plan.mode == "resident":
            if taken > plan.budget_bytes - sum(item.size_bytes for item in plan.items):
                return 0.0
        else:
            hoped = self._hoped_bytes if number == 1 else 0
            streamed = max(0, plan.streamed_bytes_per_pass + max(0, more) + taken - hoped)
            plan = replace(
                plan,
                streamed_bytes_per_pass=streamed,
                # As much is lent as beside single tokens. Of a mixture, passes of several say what experts they read.
                streamed_bytes_per_batch=plan.streamed_bytes_per_batch if plan.expert_bytes else streamed,
                expert_bytes=max(0, plan.expert_bytes - taken - self._displaced_bytes(number * position)),
            )
        return number / self._pass_s(plan, number, position)

    def _displaced_bytes(self, tokens: int) -> int:
        """Return the experts that give way to the keys and values of so many tokens; where other weights do, none."""
        if not self._plan.expert_bytes or self._plan.streamed_bytes_per_batch:
            return 0
        return max(0, read_bytes_at(self._plan, tokens, of_weights=True) - self._plan.streamed_bytes_per_pass)
