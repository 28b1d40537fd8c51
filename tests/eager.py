"""Speculation that is always on, with every width there is: what pays on a device is not what tests are about."""

from __future__ import annotations

import random
from collections.abc import Sequence

from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.speculation.drafting import Pace
from edge_run.runtime.speculation.width_control import ONE_TEXT, Offer, WidthControl

REST_SHARE = 0.1


class Eager(WidthControl):
    """Speculates always, with a random width, and has drafters rest now and then all the same.

    It is to be put in place of `speculation_setup.WidthControl`.
    """

    pace = Pace()  # what a guess takes does not count

    def __init__(self, costs: WidthCosts, most_tokens: int, least_gain: float) -> None:
        super().__init__(costs, most_tokens, least_gain)
        self._chance = random.Random(1)

    def wants_guesses(self, hoped: Sequence[Offer] = ONE_TEXT) -> bool:
        if self._chance.random() < REST_SHARE:
            self.rest()
        return True

    def best(self, offers: Sequence[tuple[int, float]]) -> int:
        return self._chance.randrange(len(offers))
