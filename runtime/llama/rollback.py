"""How far recurrent state goes back, and which of it is lost with a pass that failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from edge_run.base.protocols import BatchToken


class Rollback:
    """Which tokens can be cut off sequences whose context keeps the state before each of the last ones.

    llama.cpp cuts as many as it has places for, whatever is there: a pass fills as many as it has tokens, and what
    earlier passes left in the others is the state before other tokens. Once cut, the places are where they were.

    is_torn: a pass of several sequences has failed. llama.cpp lets their states lie side by side: it notes at once that
    states in between, of other sequences, have changed places with them, but moves each as its layer is computed. So
    no state is known to be where it should be, until the context is empty.
    """

    def __init__(self, most_tokens: int, *, has_state: bool) -> None:
        """most_tokens: for which a context has places; 0 where llama.cpp itself knows what it can cut.

        has_state: whether the model has recurrent state.
        """
        self._most, self._has_state, self._kept = most_tokens, has_state, dict[int, int]()
        self.is_torn = False

    def begin(self, tokens: Sequence[BatchToken]) -> None:
        """A pass of `tokens` begins: until it has ended, nobody knows the state of their sequences."""
        sequences = {token.sequence for token in tokens}
        self._kept.update(dict.fromkeys(sequences, -1))
        self.is_torn = self._has_state and len(sequences) > 1

    def refused(self) -> None:
        """llama.cpp had no room for the pass: it has moved nothing."""
        self.is_torn = False

    def ran(self, tokens: Sequence[BatchToken]) -> None:
        """A pass of `tokens` has ended."""
        self._kept.update({one: n - 1 for one, n in Counter(token.sequence for token in tokens).items()})
        self.is_torn = False

    def cut(self, sequence: int, n_tokens: int) -> bool:
        """Return whether the state before the last `n_tokens` tokens of a sequence is there, which are cut now."""
        kept = self._kept.get(sequence, 0)
        if n_tokens:
            self._kept[sequence] = 0
        return not self._most or n_tokens <= kept

    def empty(self, sequence: int) -> None:
        """A sequence has no tokens any more."""
        self._kept.pop(sequence, None)

    def clear(self) -> None:
        """No sequence has tokens any more."""
        self._kept.clear()
        self.is_torn = False
