"""Compares what passes over a mesh took with the plan, and says when another plan is worth making."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from edge_run.runtime.mesh.coordinator import PAYS_BACK_TOKENS, LayerCoordinator

WINDOW_TOKENS = 16
TOLERANCE = 0.2


class MeshRates:
    """What passes of one token took since the last plan. Not thread-safe."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """There is a new plan: what was measured under the old one does not count."""
        self._seconds: deque[float] = deque(maxlen=WINDOW_TOKENS)
        self._hops: deque[float] = deque(maxlen=WINDOW_TOKENS)
        self._spent: dict[str, deque[float]] = {}
        self._wide_token_s = 0.0
        self._since_check = 0
        self._shared_s: float | None = None

    @property
    def token_s(self) -> float:
        """Seconds of a token, the median of late, all answers together; 0 before there was one."""
        return statistics.median(seconds) if (seconds := tuple(self._seconds)) else 0.0

    @property
    def hop_s(self) -> float:
        """Seconds that an activation takes from one device to the next, the median of late; 0 before there was one."""
        return statistics.median(hops) if (hops := tuple(self._hops)) else 0.0

    def note(self, n_tokens: int, seconds: float, spent: Mapping[str, float], hops: int) -> None:
        """A batch of `n_tokens` took so long, of which devices computed for `spent`; the rest took so many `hops`."""
        if n_tokens > 1:
            self._wide_token_s = seconds / n_tokens
            return
        self._seconds.append(seconds)
        self._since_check += 1
        for node, at_work in spent.items():
            self._spent.setdefault(node, deque(maxlen=WINDOW_TOKENS)).append(at_work)
        if hops:
            self._hops.append(max(0.0, seconds - sum(spent.values())) / hops)

    def note_shared(self, n_tokens: int, now_s: float) -> None:
        """A pass is finished that has said `n_tokens` tokens, while others are in flight."""
        if n_tokens and self._shared_s is not None:
            self._seconds.append((now_s - self._shared_s) / n_tokens)
        self._shared_s = now_s

    def why_replan(self, coordinator: LayerCoordinator, tokens: int, *, may_group: bool) -> str:
        """Return why another plan is worth computing `tokens` tokens again, an empty string when none is."""
        if not self._hops or self._since_check < 2 * WINDOW_TOKENS:
            return ""
        self._since_check = WINDOW_TOKENS
        measured, expected = self.token_s, coordinator.plan.token_s
        if not expected or abs(measured / expected - 1) <= TOLERANCE:
            return ""
        spent = {node: statistics.median(found) for node, found in self._spent.items()}
        better = coordinator.better(spent, self.hop_s, may_group=may_group)
        if better is None:
            return ""
        saved = measured - better.token_s
        again = tokens * (self._wide_token_s or better.token_s)
        if saved <= TOLERANCE * measured or saved * PAYS_BACK_TOKENS < again:
            return ""
        return f"a token takes {measured * 1e3:.0f} ms, and could take {measured * 1e3 - saved * 1e3:.0f} ms"
