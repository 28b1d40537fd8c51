"""A speculating conversation whose guesses and widths are chosen at random: what it returns must not hang on them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from cells import VOCABULARY, Cells
from edge_run.base.protocols import Clock
from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.speculation.drafting import Guess, Guesses, WantedGuesses
from edge_run.runtime.speculation.overlap import Overlap
from edge_run.runtime.speculation.session import SpeculativeSession
from edge_run.runtime.speculation.shared_drafters import SharedDrafters
from edge_run.runtime.speculation.shared_guesses import SharedGuesses
from edge_run.runtime.speculation.tally import SpeculationTally
from edge_run.runtime.speculation.width_control import ONE_TEXT, Offer, WidthControl


class Guesser:
    """Guesses at random, sometimes what comes."""

    once_s, most_texts = 0.0, 1

    def __init__(self, chance: random.Random, coming: list[int]) -> None:
        self._chance, self._coming = chance, coming

    def belong(self, number: int, salt: str) -> None:
        assert (number, salt) == (0, "")

    def draft(self, history: Sequence[int], wanted: WantedGuesses) -> Guesses:
        assert wanted.most_depth >= 1
        found: dict[tuple[int, ...], Guess] = {}
        for _ in range(self._chance.randrange(5)):
            path: tuple[int, ...] = ()
            for depth in range(self._chance.randint(1, wanted.most_depth)):
                place = len(history) + depth
                is_right = self._chance.random() < 0.7 and place < len(self._coming)
                path += (self._coming[place] if is_right else self._chance.randrange(VOCABULARY),)
                above = found[path[:-1]].value if depth else 1.0
                found.setdefault(path, Guess(above * self._chance.random(), ("random", 0, 0), 0.5))
        return found

    def draft_many(self, texts: Mapping[int, Sequence[int]], wanted: WantedGuesses) -> dict[int, Guesses]:
        return {number: self.draft(text, wanted) for number, text in texts.items()}

    def prepare(self, texts: Mapping[int, Sequence[int]], most_depth: int) -> bool:
        """At times there is no room to go on beside a pass."""
        return self._chance.random() < 0.8

    def draft_aside(
        self, texts: Mapping[int, Sequence[int]], wanted: WantedGuesses, end: threading.Event
    ) -> dict[int, Guesses]:
        return self.draft_many(texts, wanted)


class Always(Overlap):
    """Guesses beside every pass."""

    is_on = True


class AnyWidth(WidthControl):
    """Takes any width, and speculates whenever it is asked."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(WidthCosts(), 12)
        self._chance = chance
        self.draft_s: list[float] = []

    def observe_drafting(self, seconds: float, *, once_s: float = 0.0) -> None:
        self.draft_s += [seconds - once_s] * (seconds > once_s)

    def wants_guesses(self, hoped: Sequence[Offer] = ONE_TEXT) -> bool:
        return self._chance.random() < 0.9

    def best(self, offers: Sequence[Offer]) -> int:
        return self._chance.randrange(len(offers))


def guesses_of(
    drafter: object,
    control: WidthControl,
    *,
    branches: Sequence[int] = (),
    is_exact: bool = False,
    uses_lookup: bool = False,
    clock: Clock = time.monotonic,
) -> SharedGuesses:
    """Return what `drafter` guesses of one text, as a draft model does."""
    drafters = SharedDrafters(cast("Any", drafter), uses_lookup=uses_lookup, clock=clock)
    tally = SpeculationTally("random", is_exact=is_exact)
    return SharedGuesses(control, tally, drafters, 11, branches=branches, clock=clock)


def speculating(decoder: Cells, coming: list[int], seed: int, is_exact: bool) -> SpeculativeSession:
    chance = random.Random(seed)
    branches, drafter = range(1, 6) if decoder.capabilities.can_branch else (), Guesser(chance, coming)
    guesses = guesses_of(drafter, AnyWidth(chance), branches=branches, is_exact=is_exact, uses_lookup=True)
    guesses.drafters._overlap = Always(cast("Any", drafter))
    return SpeculativeSession(decoder, guesses, is_exact=is_exact)
