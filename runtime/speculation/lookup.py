"""Guesses from the text itself: what came after the last few tokens when they were there before.

Prompt look-up (Saxena, 2023), over prompt and answer alike. What followed the last tokens when they were there before
are the guesses: after the longest run of them that was seen first, then after shorter ones, down to a single token. How
far the text has repeated so far says how likely it goes on; a guess that is worth little is verified only where a wider
pass costs little.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_run.runtime.speculation.drafting import Acceptance, Guess, Guesses, Path

LONGEST_RUN = 5
MOST_PLACES = 4  # that are guessed from: after longer runs, and later ones, first
_LONGEST_KIND = 12


class Lookup:
    """The drafter. It keeps an index of the conversation's runs of tokens. Not thread-safe."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[Path, list[int]] = {}

    def draft(self, history: Sequence[int], most_depth: int, most_guesses: int, acceptance: Acceptance) -> Guesses:
        """Return what followed the runs that end `history`; see `Drafter.draft`."""
        self._follow(history)
        guesses: dict[Path, Guess] = {}
        for end in self._places(history):
            matched = self._matched(end)
            value = 1.0
            for depth in range(1, min(most_depth, len(history) - end) + 1):
                kind = ("lookup", min(matched + depth - 1, _LONGEST_KIND), min(depth, 8))
                prior = 1 - 0.6 / (matched + depth)
                value *= acceptance.chance(kind, prior)
                guesses.setdefault(tuple(self._tokens[end : end + depth]), Guess(value, kind, prior))
        return guesses

    def _places(self, history: Sequence[int]) -> list[int]:
        """Return where, before its end, the last tokens of `history` were already: after what they are as a run."""
        places: dict[int, None] = {}
        for length in range(min(LONGEST_RUN, len(history)), 0, -1):
            ends = self._ends.get(tuple(history[-length:]), ())
            places.update((end, None) for end in reversed(ends) if end < len(history))
        return list(places)[:MOST_PLACES]

    def _matched(self, end: int) -> int:
        """Return how many tokens before `end` are those before the end of the text."""
        length, most = 0, min(end, _LONGEST_KIND)
        while length < most and self._tokens[end - 1 - length] == self._tokens[-1 - length]:
            length += 1
        return length

    def _follow(self, history: Sequence[int]) -> None:
        """Index what is new in `history`; a conversation that is another one is indexed anew."""
        known = len(self._tokens)
        if known > len(history) or list(history[:known]) != self._tokens:
            self._tokens, self._ends, known = [], {}, 0
        self._tokens.extend(history[known:])
        for end in range(known + 1, len(self._tokens) + 1):
            for length in range(1, min(LONGEST_RUN, end) + 1):
                places = self._ends.setdefault(tuple(self._tokens[end - length : end]), [])
                places.append(end)
                del places[: -MOST_PLACES - 1]
