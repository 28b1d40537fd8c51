"""What was refused and why: counts, and the last few in words, for `edge-run mesh doctor`. Bounded."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from edge_run.base.errors import EdgeRunError
from edge_run.devices.messages.envelope import StaleClock

MOST_KEPT = 64


@dataclass(slots=True)
class Refusals:
    """Messages that were not let in. counts: by class of the error."""

    counts: Counter[str] = field(default_factory=Counter)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_KEPT))
    skews_s: dict[str, float] = field(default_factory=dict)

    def add(self, error: EdgeRunError) -> None:
        """Note a refusal."""
        self.counts[type(error).__name__] += 1
        if str(error) not in self.last:
            self.last.append(str(error))
        if isinstance(error, StaleClock) and len(self.skews_s) < MOST_KEPT:
            self.skews_s[error.node] = error.skew_s

    @property
    def total(self) -> int:
        """How many there were."""
        return sum(self.counts.values())
