"""Counts refused messages and keeps the latest refusals, for `edge-run mesh doctor`. Bounded."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TypeVar

from edge_run.base.errors import EdgeRunError
from edge_run.devices.messages.envelope import StaleClock

MOST_KEPT = 64

_Refusal = TypeVar("_Refusal", bound=EdgeRunError)


@dataclass(slots=True)
class Refusals:
    """Messages that were not let in.

    counts: by class of the error.
    latest: the last error of each kind of words, the oldest first.
    skews_s: by how much the clocks of nodes are off.
    """

    counts: Counter[type[EdgeRunError]] = field(default_factory=Counter)
    latest: deque[EdgeRunError] = field(default_factory=lambda: deque(maxlen=MOST_KEPT))
    skews_s: dict[str, float] = field(default_factory=dict)

    def add(self, error: EdgeRunError) -> None:
        """Note a refusal."""
        self.counts[type(error)] += 1
        for known in self.latest:
            if str(known) == str(error):
                self.latest.remove(known)
                break
        self.latest.append(error)
        if isinstance(error, StaleClock) and len(self.skews_s) < MOST_KEPT:
            self.skews_s[error.node] = error.skew_s

    def count(self, kind: type[EdgeRunError]) -> int:
        """Return how many there were of `kind` and its subclasses."""
        return sum(count for found, count in self.counts.items() if issubclass(found, kind))

    def last(self, kind: type[_Refusal], besides: tuple[type[EdgeRunError], ...] = ()) -> _Refusal | None:
        """Return the latest of `kind`, those of `besides` aside; None where there was none."""
        found = (one for one in reversed(self.latest) if isinstance(one, kind) and not isinstance(one, besides))
        return next(found, None)

    def copy(self) -> Refusals:
        """Return these refusals, which change no more."""
        return Refusals(self.counts.copy(), self.latest.copy(), dict(self.skews_s))

    @property
    def total(self) -> int:
        """How many there were."""
        return sum(self.counts.values())
