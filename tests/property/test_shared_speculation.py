"""Guesses of several requests in one pass, over a cache of cells: each row that a token is chosen by is its text's."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cells import CONTEXT, VOCABULARY, Cells, row_of
from edge_run.base.errors import TierReadError
from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.generation.scheduled_passes import BegunPass, ComputedPart, ScheduledPasses
from edge_run.runtime.scheduling.scheduler import PassRules, Scheduler
from edge_run.runtime.scheduling.sequences import SequencePool
from edge_run.runtime.scheduling.widths import PassWidths
from edge_run.runtime.speculation.drafting import Guess, Guesses, WantedGuesses
from edge_run.runtime.speculation.shared_drafters import OpenText, SharedDrafters
from edge_run.runtime.speculation.shared_guesses import SharedGuesses
from edge_run.runtime.speculation.tally import SpeculationTally
from edge_run.runtime.speculation.width_control import ONE_TEXT, Offer, WidthControl

N_TEXTS, BRANCHES, WIDTH = 3, range(3, 6), 12


class AnyWidth(WidthControl):
    """Guesses always, and takes any width."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(WidthCosts(), WIDTH)
        self._chance = chance

    def wants_guesses(self, hoped: Sequence[Offer] = ONE_TEXT) -> bool:
        return True

    def best(self, offers: Sequence[tuple[int, float]]) -> int:
        return self._chance.randrange(len(offers))

    def expected_s(self, width: int, *, is_guessed: bool) -> float:
        return 1.0


class Guesser:
    """Guesses for several texts at random, often what comes."""

    most_texts, once_s = N_TEXTS, 0.0

    def __init__(self, chance: random.Random, texts: Sequence[list[int]]) -> None:
        self._chance, self._texts = chance, texts

    def belong(self, number: int, salt: str) -> None:
        assert salt == ""

    def n_unread(self, number: int, text: Sequence[int]) -> int:
        return self._chance.choice([1, 1000])

    def prepare(self, texts: Mapping[int, Sequence[int]], most_depth: int) -> bool:
        """There is no room to guess beside a pass."""
        return False

    def draft_many(self, texts: Mapping[int, Sequence[int]], wanted: WantedGuesses) -> dict[int, Guesses]:
        drafted = dict[int, Guesses]()
        for number, text in texts.items():
            found: dict[tuple[int, ...], Guess] = {}
            coming = next((one for one in self._texts if one[: len(text)] == list(text)), [])
            for _ in range(self._chance.randrange(4)):
                path, above = tuple[int, ...](), 1.0
                for depth in range(self._chance.randint(1, wanted.most_depth)):
                    place = len(text) + depth
                    is_right = self._chance.random() < 0.7 and place < len(coming)
                    path += (coming[place] if is_right else self._chance.randrange(VOCABULARY),)
                    above *= self._chance.random()
                    above = found.setdefault(path, Guess(above, ("random", 0, 0), 0.5)).value
            drafted[number] = found
        return drafted


class Served:
    """Requests whose whole texts are known: what a batch does with them, without a model."""

    def __init__(self, texts: Sequence[list[int]], seed: int, can_branch: bool) -> None:
        self.chance, self.texts = random.Random(seed), texts
        self.decoder = Cells(can_branch)
        pool = SequencePool(N_TEXTS, CONTEXT, can_rewind=True, can_share=can_branch)
        self.pool = pool
        self.scheduler = Scheduler(pool, PassWidths(WidthCosts(), WIDTH), lambda: 0.0, PassRules(CONTEXT))
        self.passes = ScheduledPasses(self.scheduler, pool, self.decoder)
        self.guesses = SharedGuesses(
            AnyWidth(self.chance),
            SpeculationTally("random"),
            SharedDrafters(cast("Any", Guesser(self.chance, texts)), uses_lookup=True),
            most_guesses=9,
            branches=BRANCHES if can_branch else (),
        )
        self.whole: dict[int, list[int]] = {}
        self.begun: set[int] = set()

    def submit(self, text: list[int]) -> None:
        number = self.scheduler.submit(text[: self.chance.randint(1, len(text) - 1)])
        self.whole[number] = text

    def end(self, number: int) -> None:
        self.scheduler.end(number)
        self.guesses.end(number)
        del self.whole[number]

    def step(self) -> None:
        """Compute a pass, as `Batch.advance` does."""
        self.passes.admit()
        for number in set(self.scheduler.running()) - self.begun:
            self.guesses.begin(number)
            self.begun.add(number)
        planned = self.passes.plan(self.guesses.most_spare)
        if planned is None:
            return
        texts = {}
        for part in planned.parts if planned.is_of_answers else ():
            tokens = self.scheduler.tokens(part.request)
            left = len(self.whole[part.request]) - len(tokens)
            texts[part.request] = OpenText(tokens, part.sequence, min(CONTEXT - len(tokens), left - 1))
        trees = self.guesses.plan(texts, planned.free_cells) if texts else {}
        try:
            computed = self.passes.finish()[1] if self.passes.begin(BegunPass(planned, trees)) else []
        except TierReadError:
            computed = []
        if planned.is_of_answers and computed:
            self.guesses.passed(trees, [part.request for part in planned.parts], 1.0, 0.0, has_prompts=False)
        for one in computed:
            if one.found:
                self.choose(one)
                self.passes.settle(one)
        self.check()

    def choose(self, one: ComputedPart) -> None:
        number, is_guessed = one.part.request, True
        assert one.found
        while is_guessed:
            so_far, text = self.scheduler.tokens(number), self.whole[number]
            assert np.array_equal(one.found.row, row_of(so_far))
            token = text[len(so_far)]
            is_guessed = self.guesses.follows(number, one.found, token)
            self.scheduler.append(number, token, is_computed=is_guessed)
            if len(so_far) == len(text) or self.chance.random() < 0.02:
                self.end(number)
                return

    def check(self) -> None:
        """What the decoder holds is what the pool says, in as many cells, and no branch is left."""
        self.pool.check()
        for sequence in range(N_TEXTS):
            assert len(self.decoder.text(sequence)) == self.pool.n_held(sequence)
        assert all(members <= set(range(N_TEXTS)) for _, _, members in self.decoder.cells), "a branch is left"
        assert len(self.decoder.cells) == self.pool.used_cells


TEXTS = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=20), min_size=1, max_size=7)


@given(TEXTS, st.integers(0, 2**32), st.booleans(), st.booleans())
def test_every_token_is_chosen_by_the_row_of_its_own_text(
    texts: list[list[int]], seed: int, can_branch: bool, fails: bool
) -> None:
    """They come at random, some are cancelled, passes fail, and cells run out."""
    served = Served(texts, seed, can_branch)
    served.decoder._failing = random.Random(seed) if fails else None
    waiting = list(texts)
    for _ in range(600):
        if waiting and served.chance.random() < 0.5:
            served.submit(waiting.pop())
        if served.whole and served.chance.random() < 0.02:
            served.end(served.chance.choice(sorted(served.whole)))
        served.step()
        if not waiting and not served.whole:
            return
    raise AssertionError(f"never done: {served.whole}")


def test_guesses_save_passes_of_all_requests() -> None:
    chance = random.Random(3)
    texts = [[chance.randrange(VOCABULARY) for _ in range(12)] for _ in range(3)]
    n_passes = 0
    for seed in range(20):
        served = Served(texts, seed, can_branch=True)
        for text in texts:
            served.submit(text)
        while served.whole:
            served.step()
        figures = served.guesses.figures()
        assert sum(figures.widths.values()) == figures.passes
        n_passes += figures.passes
        assert figures.accepted > 0
    assert n_passes < 0.8 * 20 * sum(map(len, texts))
