"""What the passes of a plan read: of weights that stream in order always as much, of experts what is missing."""

from __future__ import annotations

import itertools
import math

from edge_run.base.results import Plan
from edge_run.partition.cost import PassWork
from edge_run.runtime.forecasting.routing import MOST_SHARE

READ_BYTES_PER_S, COMPUTED_BYTES_PER_S = 1e9, 20e9  # of a device that was not measured
HOPE = 4.0  # the power of the share without room, which a token misses of its experts if it chooses them unevenly


def read_bytes_at(plan: Plan, tokens: int, *, of_weights: bool = False) -> int:
    """Return what a pass of one token reads when the context has `tokens` tokens, keys and values too.

    of_weights: without these. Between two points of `plan.by_context` it is in proportion, after the last one as there.
    """
    points = [(0, plan.streamed_bytes_per_pass)]
    for one in plan.by_context:
        points.append((one.tokens, one.streamed_bytes_per_pass + (0 if of_weights else one.kv_bytes_per_pass)))
    for (low, less), (high, more) in itertools.pairwise(points):
        if low <= tokens < high:
            return less + (more - less) * (tokens - low) // (high - low)
    return points[-1][1]


class PassBytes:
    """The bytes that passes of `plan` read into memory that was not used before, and into memory that was.

    all_experts: the bytes of all experts.
    """

    def __init__(self, plan: Plan, work: PassWork) -> None:
        """work: the work of a pass, with the weights that it multiplies with."""
        self._plan, self._work = plan, work
        self.all_experts = self._touched(math.inf, math.inf)

    def at_first(self, tokens: int, n_outputs: int) -> tuple[float, float]:
        """Return what the first pass reads."""
        plan = self._plan
        if not plan.expert_bytes:
            on_gpu = plan.gpu.weights_bytes if plan.gpu else 0
            used = plan.pinned_bytes + plan.lent_bytes + plan.streamed_bytes_per_pass + on_gpu  # not tables: their rows
            whole = min(plan.model_bytes, used) if plan.mode == "streamed" else plan.model_bytes
            fresh = min(whole, plan.pinned_bytes + plan.window_bytes)
            return fresh, whole - fresh
        touched, dense = self._touched(tokens, n_outputs), plan.streamed_bytes_per_batch
        new = plan.pinned_bytes + min(dense, plan.window_bytes) + min(touched, plan.expert_bytes)
        return new, plan.pinned_bytes + dense + touched - new

    def later(self, tokens: int, n_outputs: int) -> tuple[float, float]:
        """Return what a later pass reads, all of it into memory that was used before."""
        plan = self._plan
        if tokens == 1:
            return 0, plan.streamed_bytes_per_pass
        missing = self._missing(tokens, n_outputs) if plan.expert_bytes else 0
        return 0, plan.streamed_bytes_per_batch + missing  # of a mixture's dense weights, those that stream

    def usual_s(self, tokens: int, n_outputs: int, attention_s: float = 0.0) -> float:
        """Return the seconds of a later pass on a device that was not measured.

        It is taken to compute no longer than it takes to see the weights, and `attention_s` more.
        """
        computed = self._plan.model_bytes - self.all_experts + self._touched(tokens, n_outputs)
        read_s = self.later(tokens, n_outputs)[1] / READ_BYTES_PER_S
        return max(read_s, computed / COMPUTED_BYTES_PER_S + attention_s)

    @property
    def hoped_bytes(self) -> int:
        """What a token may read less than the plan says, where no earlier run told how evenly it chooses experts.

        The plan takes it to miss the share of its experts that has no room; of models that choose unevenly it misses
        far less, while many texts together use nearly all experts of any model.
        """
        share = min(1.0, self._plan.expert_bytes / self.all_experts) if self.all_experts else 1.0
        return int(self._touched(1, 1) * ((1 - share) - (1 - share) ** HOPE))

    def is_ahead(self, tokens: int) -> bool:
        """Whether a pass uses so many of the experts that they are read before it is known which."""
        return self._touched(tokens, 0) >= MOST_SHARE * self._touched(math.inf, 0)

    def _touched(self, tokens: float, n_outputs: float) -> float:
        """Return the bytes of the experts that `tokens` tokens use if they choose evenly; all for infinitely many."""
        experts = [work for work in self._work.matmuls if work.n_experts]
        unused = [(1 - work.n_used / work.n_experts) ** (n_outputs if work.is_head else tokens) for work in experts]
        return float(sum(work.size_bytes * (1 - share) for work, share in zip(experts, unused, strict=True)))

    def _missing(self, tokens: int, n_outputs: int) -> float:
        """Return the bytes of the experts that a prompt's pass uses and that the pass before did not leave in memory.

        Where not all experts have room, some room is left for experts that are used and not cached: those missing of
        one tensor, and of the next one. The experts that only the last token uses get the room that the others leave.
        """
        room, passing = self._plan.expert_bytes, self._work.expert_tensor_bytes
        inner, outer = (self._touched(math.inf, 0), self._touched(0, math.inf))
        kept_inner, kept_outer = min(inner, room), min(outer, max(0.0, room - inner))
        if inner > room:
            passing *= 2 if room >= 2 * passing else 1
            kept_inner = max(0.0, inner - (inner - room) / max(1 - passing / inner, 1e-9))
        missing = self._touched(tokens, 0) * (1 - kept_inner / inner) if inner else 0.0
        return missing + (self._touched(0, n_outputs) * (1 - kept_outer / outer) if outer else 0.0)
