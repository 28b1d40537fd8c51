"""How far sequences go back that cannot be cut anywhere, and what is lost with a pass that failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from edge_run.base.protocols import BatchToken


class Rollback:
    """Which tokens can be cut off sequences whose context keeps the state before each of the last ones.

    llama.cpp cuts as many as it has places for, whatever is there: a pass fills as many as it has tokens, and what
    earlier passes left in the others is the state before other tokens. Once cut, the places are where they were.

    is_torn: a pass of several sequences has failed. llama.cpp lets their states lie side by side: it notes at once that
    states in between, of other sequences, have changed places with them, but moves each as its layer is computed. So
    no state is known to be where it should be, until the context is empty.

    What llama.cpp takes back itself, of a pass that failed, leaves free cells as any cut does.
    """

    def __init__(
        self,
        most_tokens: int,
        loses_order: Callable[[int, int], bool] = lambda start, stop: False,
        *,
        has_state: bool,
    ) -> None:
        """most_tokens: for which a context has places; 0 where llama.cpp itself knows what it can cut.

        loses_order: as of `Capabilities`. has_state: whether the model has recurrent state.
        """
        self._most, self._has_state, self._kept = most_tokens, has_state, dict[int, int]()
        self._loses_order, self._begun = loses_order, set[int]()  # whose pass would lose it
        self.is_torn = False

    def begin(self, tokens: Sequence[BatchToken]) -> None:
        """A pass of `tokens` begins: until it has ended, nobody knows the state of their sequences."""
        starts = {token.sequence: token.position for token in reversed(tokens)}
        stops = {token.sequence: token.position + 1 for token in tokens}
        self._kept.update(dict.fromkeys(starts, -1))
        self.is_torn = self._has_state and len(starts) > 1
        self._begun.update(one for one, start in starts.items() if self._loses_order(start, stops[one]))

    def refused(self) -> None:
        """llama.cpp had no room for the pass: it has moved nothing."""
        self.is_torn = False
        self._begun.clear()

    def ran(self, tokens: Sequence[BatchToken]) -> None:
        """A pass of `tokens` has ended."""
        self._kept.update({one: n - 1 for one, n in Counter(token.sequence for token in tokens).items()})
        self.refused()

    def cut(self, sequence: int, position: int, n_tokens: int) -> bool:
        """Return whether a sequence can go on from `position`, where its last `n_tokens` tokens are cut now."""
        kept = self._kept.get(sequence, 0)
        if n_tokens:
            self._kept[sequence] = 0
        is_in_order = sequence not in self._begun and not self._loses_order(position, position + n_tokens)
        return is_in_order and (not self._most or n_tokens <= kept)

    def empty(self, sequence: int) -> None:
        """A sequence has no tokens any more."""
        self._kept.pop(sequence, None)
        self._begun.discard(sequence)

    def clear(self) -> None:
        """No sequence has tokens any more."""
        self._kept.clear()
        self.refused()
