"""What the next pass may be: how wide, and with which guesses.

Where each text has cells of its own, it has as many tokens in a pass as every other one, padding included
(`runtime/decoding/padding.py`): guesses are chains of one length. In exact passes it has two at least, and the first
guess of each costs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from edge_run.runtime.decoding.padding import padded_width
from edge_run.runtime.speculation.drafting import Guess, RankedGuess
from edge_run.runtime.speculation.shared_drafters import OpenText
from edge_run.runtime.speculation.width_control import WIDTHS, Offer

HOPED_CHANCE = 0.6  # of a guess that is not made yet


class PassOffers:
    """What passes may be.

    most_tokens: in a pass, the certain ones included.
    least_tokens: of each text in a pass, where all have as many, padding included; 0: each has what it needs.
    """

    def __init__(self, most_tokens: int, least_tokens: int = 0) -> None:
        self.most_tokens, self._least_tokens = most_tokens, least_tokens

    def of(
        self, texts: Mapping[int, OpenText], ranked: Sequence[RankedGuess]
    ) -> list[tuple[Offer, Sequence[RankedGuess]]]:
        """Return what the next pass may be, and with which of `ranked`; the first is without guesses."""
        n_texts, n_sequences = len(texts), span_of(text.sequence for text in texts.values())
        if not self._least_tokens:
            most = min(self.most_tokens, n_texts + len(ranked))
            widths = [n_texts, *(width for width in WIDTHS if n_texts < width <= most)]
            values = [0.0, *itertools.accumulate(one.guess.value for one in ranked)]
            return [((width, n_texts + values[width - n_texts]), ranked[: width - n_texts]) for width in widths]
        most, longest = self.most_tokens // n_sequences, 1 + max((len(one.path) for one in ranked), default=0)
        lengths = [length for length in WIDTHS if 1 < length <= min(most, longest)]
        chains = [(n_sequences * length, [one for one in ranked if len(one.path) < length]) for length in lengths]
        offers = [(self.width_of([1] * n_texts, n_sequences), []), *chains]
        return [((width, n_texts + sum(one.guess.value for one in taken)), taken) for width, taken in offers]

    def hoped(self, texts: Mapping[int, OpenText], most: int) -> Sequence[Offer]:
        """Return what the next pass may be with so many guesses, if guesses come true as often as may be hoped for.

        A text that is alone is guessed at without that: only what is plain counts.
        """
        most = most if len(texts) > 1 else 0
        depths = range(1, 1 + max(text.most_depth for text in texts.values()))
        guesses = (
            RankedGuess(number, tuple(range(depth)), _hoped_for(depth))
            for depth in depths
            for number in texts
            if depth <= texts[number].most_depth
        )
        return [offer for offer, _ in self.of(texts, list(itertools.islice(guesses, most)))]

    def width_of(self, n_tokens: Sequence[int], n_sequences: int = 0) -> int:
        """Return how wide a pass is in which texts have so many tokens each.

        n_sequences: from the first of theirs to the last; those between are padded too. 0: they have all of them.
        """
        n_sequences = n_sequences or len(n_tokens)
        return padded_width(n_tokens, n_sequences, self._least_tokens) if self._least_tokens else sum(n_tokens)


def span_of(sequences: Iterable[int]) -> int:
    """Return how many sequences there are from the first to the last of `sequences`; 0 where there are none."""
    found = list(sequences)
    return max(found) - min(found) + 1 if found else 0


@cache
def _hoped_for(depth: int) -> Guess:
    """Return a guess at that depth that is not made yet."""
    return Guess(HOPED_CHANCE**depth, ("hoped", depth, 0), HOPED_CHANCE)
