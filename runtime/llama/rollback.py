"""How far recurrent state goes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from edge_run.base.protocols import BatchToken


class Rollback:
    """Which tokens can be cut off sequences whose context keeps the state before each of the last ones.

    llama.cpp cuts as many as it has places for, whatever is there: a pass fills as many as it has tokens, and what
    earlier passes left in the others is the state before other tokens. Once cut, the places are where they were.
    """

    def __init__(self, most_tokens: int) -> None:
        """most_tokens: for which a context has places; 0 where llama.cpp itself knows what it can cut."""
        self._most, self._kept = most_tokens, dict[int, int]()

    def begin(self, tokens: Sequence[BatchToken]) -> None:
        """A pass of `tokens` begins: until it has ended, nobody knows the state of their sequences."""
        self._kept.update(dict.fromkeys((token.sequence for token in tokens), -1))

    def ran(self, tokens: Sequence[BatchToken]) -> None:
        """A pass of `tokens` has ended."""
        self._kept.update({one: n - 1 for one, n in Counter(token.sequence for token in tokens).items()})

    def cut(self, sequence: int, n_tokens: int) -> bool:
        """Return whether the state before the last `n_tokens` tokens of a sequence is there, which are cut now."""
        kept = self._kept.get(sequence, 0)
        if n_tokens:
            self._kept[sequence] = 0
        return not self._most or n_tokens <= kept

    def empty(self, sequence: int) -> None:
        """A sequence has no tokens any more."""
        self._kept.pop(sequence, None)
