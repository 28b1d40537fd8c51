"""How one of several ways to prepare a model is chosen: that with which a text is expected to take the least time.

In seconds where the device was measured, else by what is read and computed. What was chosen before stays unless another
way gains more than a tenth, as the numerics key hangs on it. It is forgotten when the file's status changes, be it by a
new mode or one more link: an edit can set back all else that tells of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from edge_run.base.errors import BudgetError
from edge_run.base.profile import DeviceProfile
from edge_run.base.results import Plan
from edge_run.runtime.forecasting.forecast import window_of_many
from edge_run.runtime.forecasting.pass_bytes import PassBytes
from edge_run.runtime.planning.planner import Planner
from edge_run.runtime.planning.prepared import Prepared

ANSWER_TOKENS = 256  # that a text goes on with
LEAST_GAIN = 1.1

Way = TypeVar("Way", int, str)


@dataclass(frozen=True, slots=True)
class Weighed(Generic[Way]):
    """A way, what the model was prepared as and planned with it, and the seconds that a text is expected to take.

    least_gain: how much faster it has to be than others, to be worth what it costs besides.
    """

    way: Way
    prepared: Prepared
    plan: Plan
    cost_s: float
    least_gain: float = 1.0

    @property
    def has_room(self) -> bool:
        """Whether the whole context that was asked for has room."""
        return self.plan.context_tokens >= self.plan.wanted_context_tokens

    @property
    def reads_ahead(self) -> bool:
        """Whether what streams in order has the window that many answers want."""
        plan = self.plan
        return plan.mode != "streamed" or bool(plan.expert_bytes) or plan.window_bytes >= window_of_many(plan)

    @property
    def weight(self) -> float:
        """What is compared."""
        return self.cost_s * self.least_gain


def best(able: Sequence[Weighed[Way]], kept: Way | None, *, is_kept_at_any_cost: bool = False) -> Weighed[Way]:
    """Return the best of `able`, of which the first is to be preferred.

    kept: the way that was chosen before. is_kept_at_any_cost: it stays, as the costs are not to be trusted.
    """
    found = min(able, key=lambda one: one.weight)
    earlier = next((one for one in able if one.way == kept), None)
    if earlier and (is_kept_at_any_cost or earlier.weight <= LEAST_GAIN * found.weight):
        return earlier
    return found


def smaller(refusal: BudgetError | None, other: BudgetError) -> BudgetError:
    """Return the refusal that names the smaller budget."""
    return other if refusal is None or other.minimum_bytes < refusal.minimum_bytes else refusal


def text_s(
    prepared: Prepared,
    plan: Plan,
    n_tokens: int,
    width: int,
    profile: DeviceProfile | None,
    attention: tuple[float, float] | None = None,
) -> float:
    """Return the seconds that a text of so many tokens, read in passes of `width`, and its answer are expected to take.

    Where several are answered at once, all of these: each is read, and they share the passes of their answers.

    profile: the speed of this device, where it is known.
    attention: floating point operations a second in narrow and wide passes; where nothing else was measured, attention
        counts with them alone.
    """
    planner, n_texts = Planner(prepared), max(1, prepared.config.sequences)
    answering = plan
    if not plan.expert_bytes:  # few tokens leave buffers idle
        answering = replace(plan, streamed_bytes_per_batch=plan.streamed_bytes_per_pass)
    if profile and planner.can_time(profile):
        prompt_s = planner.times(plan, profile).prefill_s(n_tokens, width, is_first=False)
        token_s = planner.times(answering, profile).pass_s(n_texts, n_tokens, n_texts, is_first=False)
        return n_texts * prompt_s + ANSWER_TOKENS * token_s
    work = planner.work
    narrow, wide = attention or (math.inf, math.inf)
    n_passes, attention_s = -(-n_tokens // width), n_texts * work.attention_of(1, n_tokens) / narrow
    prompt_s = n_passes * PassBytes(plan, work).usual_s(width, 1) + work.attention_of(n_tokens, 0) / wide
    token_s = PassBytes(answering, work).usual_s(n_texts, n_texts, attention_s)
    return n_texts * prompt_s + ANSWER_TOKENS * token_s
