"""What the key of each request was given so far, and which request is next by that.

A request goes before others by its priority, which rises while its key gets nothing, so that none waits for ever; then
by the tokens that its key had so far, fewest first (Sheng et al., Fairness in Serving Large Language Models, 2024), or
else by the last turn of its key, longest ago first; then by when it came.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

MOST_GONE = 100  # keys that no request has, but are remembered
AGING_S = 30.0  # without anything, for which the requests of a key count as one priority higher


@dataclass(slots=True)
class _Share:
    """What a key was given.

    tokens: how many tokens.
    turn: the number of its last admission.
    admitted_s: by priority, when a request of it was admitted last.
    """

    tokens: int
    turn: int = -1
    admitted_s: dict[int, float] = field(default_factory=dict)


class Shares:
    """What each key was given.

    Of the keys that no request has, those that were given most are remembered, as long as that puts them behind others.
    """

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}

    def enter(self, key: str, present: Iterable[str]) -> None:
        """A key has a request; it gets no credit for the time when it had none. present: the keys of the others."""
        least = min((self._shares[other].tokens for other in present if other != key), default=0)
        share = self._shares.setdefault(key, _Share(least))
        share.tokens = max(share.tokens, least)

    def leave(self, present: Iterable[str]) -> None:
        """Forget the keys that would be as new ones if they came again. present: the keys that have requests."""
        kept = set(present)
        if not kept:
            self._shares = {}
            return
        least = min(self._shares[key].tokens for key in kept)
        gone = (key for key, share in self._shares.items() if key not in kept and share.tokens > least)
        kept.update(heapq.nlargest(MOST_GONE, gone, key=lambda key: self._shares[key].tokens))
        self._shares = {key: share for key, share in self._shares.items() if key in kept}

    def admit(self, key: str, priority: int, turn: int, now_s: float) -> None:
        """A request of a key is admitted."""
        share = self._shares[key]
        share.turn, share.admitted_s[priority] = turn, now_s

    def give(self, key: str, n_tokens: int) -> None:
        """Tokens of a key are computed."""
        self._shares[key].tokens += n_tokens

    def rank(self, key: str, priority: int, arrived_s: float, now_s: float) -> tuple[float, int, int]:
        """Return what sorts the requests that wait: the least is next, and of equal ones that which came first."""
        share = self._shares[key]
        waited_s = now_s - max(arrived_s, share.admitted_s.get(priority, arrived_s))
        return -(priority + waited_s // AGING_S), share.tokens, share.turn
