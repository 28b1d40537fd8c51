"""How far trees of guesses are grown: as far as the tokens that they gain are worth the time of the draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_run.base.errors import KernelError
from edge_run.base.protocols import BatchToken, Logits
from edge_run.runtime.speculation.draft_trees import CHOICES, TIMED_EVERY, DraftTrees, likeliest
from edge_run.runtime.speculation.drafting import Acceptance, Guess, Guesses, Pace, WantedGuesses

VOCABULARY, BEAM = 50, 8
BASE_S, PATH_S = 0.04, 0.01


class Slow:
    """A decoder after whose every token the same tokens are as likely; it takes the time of a slow processor."""

    def __init__(self, chances: Sequence[float]) -> None:
        self.row = np.full(VOCABULARY, -20.0, np.float32)
        self.row[: len(chances)] = np.log(chances)
        self.now, self.widths = 0.0, list[int]()

    def decode(self, batch: Sequence[BatchToken]) -> Logits:
        self.widths.append(len(batch))
        self.now += BASE_S + PATH_S * len(batch)
        return np.tile(self.row, (len(batch), 1))

    def branch(self, sequence: int, branches: Sequence[int]) -> None:
        assert sequence not in branches

    def grown(self, tokens_per_s: float, guess_s: float = 0.0, *, can_branch: bool = True, n_trees: int = 2) -> Guesses:
        """Return the last of some trees: what a level takes is known by then."""
        pace = Pace(tokens_per_s, guess_s)
        trees = DraftTrees(
            cast("Any", self), range(1, 2 * BEAM) if can_branch else (), BEAM, VOCABULARY, lambda: self.now
        )
        for _ in range(n_trees):
            self.widths.clear()
            found = trees.grow({0: 3}, self.row[None], 1000, WantedGuesses(16, 48, believed(), pace))
        return found[0]


def believed() -> Acceptance:
    """Return what is known of a drafter whose guesses came true as often as it said."""
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.observe(Guess(1.0, ("draft", 9, 9), 1.0), True)
    return acceptance


def worth(guesses: Guesses) -> float:
    """The tokens that a pass over the best guesses gains."""
    return sum(sorted((guess.value for guess in guesses.values()), reverse=True)[:16])


def test_where_time_costs_nothing_a_tree_is_as_deep_and_broad_as_it_may_be() -> None:
    decoder = Slow([0.5, 0.3, 0.1])
    assert max(map(len, decoder.grown(0.0))) > 5
    assert max(decoder.widths) == BEAM


@pytest.mark.parametrize("can_branch", [True, False])
def test_a_text_that_is_hard_to_guess_is_not_guessed_far(can_branch: bool) -> None:
    decoder = Slow([0.5, 0.3, 0.1])
    all_of_it, all_s = decoder.grown(0.0, can_branch=can_branch), sum(decoder.widths)
    found = decoder.grown(4.0, can_branch=can_branch)
    assert sum(decoder.widths) < all_s / 2
    assert worth(found) > 0.8 * worth(all_of_it)


def test_a_text_that_is_easy_to_guess_is_guessed_as_far_but_not_as_broadly() -> None:
    decoder = Slow([0.95, 0.02, 0.01])
    all_of_it, all_widths = decoder.grown(0.0), list(decoder.widths)
    found = decoder.grown(2.0)
    assert max(map(len, found)) == max(map(len, all_of_it)) == 16
    assert max(decoder.widths) < max(all_widths)
    assert worth(found) > 0.98 * worth(all_of_it)


def test_the_faster_the_text_comes_the_less_is_guessed() -> None:
    decoder, n_followed = Slow([0.7, 0.2, 0.05]), list[int]()
    for tokens_per_s in (0.0, 0.5, 2.0, 8.0, 1000.0):
        found = decoder.grown(tokens_per_s)
        n_followed.append(sum(decoder.widths))
    assert n_followed == sorted(n_followed, reverse=True)
    assert len(set(n_followed)) > 3
    assert n_followed[-1] == 0
    assert len(found) == CHOICES, "what the text's own logits say costs nothing"


def test_the_longer_a_guess_makes_the_pass_the_less_is_guessed() -> None:
    decoder, n_followed = Slow([0.7, 0.2, 0.05]), list[int]()
    for guess_s in (0.0, 0.05, 0.1, 0.2):
        decoder.grown(2.0, guess_s)
        n_followed.append(sum(decoder.widths))
    assert n_followed == sorted(n_followed, reverse=True)
    assert len(set(n_followed)) > 2


def test_before_a_level_was_timed_all_are_followed_up() -> None:
    decoder = Slow([0.5, 0.3, 0.1])
    decoder.grown(1000.0, n_trees=1)
    assert decoder.widths[:1] == [3]
    assert len(decoder.widths) == 1, "and then it is known"


def test_levels_that_took_too_long_are_timed_again_some_time() -> None:
    """As after a first tree beside another program at work."""
    decoder = Slow([0.95, 0.02, 0.01])
    trees = DraftTrees(cast("Any", decoder), range(1, 2 * BEAM), BEAM, VOCABULARY, lambda: decoder.now * slowness)
    wanted, lengths, slowness = WantedGuesses(16, 48, believed(), Pace(2.0)), {0: 3}, 100.0
    trees.grow(lengths, decoder.row[None], 1000, wanted)
    assert max(map(len, trees.grow(lengths, decoder.row[None], 1000, wanted)[0])) == 1, "nothing is followed up"
    decoder.now, slowness = decoder.now * 100.0, 1.0
    depths = [max(map(len, trees.grow(lengths, decoder.row[None], 1000, wanted)[0])) for _ in range(20 * TIMED_EVERY)]
    assert depths[0] == 1
    assert depths[-1] > 9


@pytest.mark.parametrize("values", [[np.nan], [np.inf], [np.nan] * VOCABULARY, [-np.inf] * VOCABULARY])
def test_logits_that_are_not_numbers_are_no_guesses(values: Sequence[float]) -> None:
    """A single chance that is no number would be held against all that come after it."""
    decoder = Slow([0.5, 0.3, 0.1])
    decoder.row[-len(values) :] = values
    with pytest.raises(KernelError, match="draft model: gave logits that are not numbers"):
        decoder.grown(0.0)


def test_tokens_that_cannot_come_are_no_fault() -> None:
    decoder = Slow([0.5, 0.3, 0.1])
    decoder.row[10:] = -np.inf
    assert all(np.isfinite(guess.value) for guess in decoder.grown(0.0).values())


@given(
    st.integers(CHOICES, 5000),
    st.integers(0, 2**32),
    st.sampled_from([2, 20, 10**6]),
    st.floats(0.0, 1.0),
)
def test_the_likeliest_tokens_are_those_of_all(length: int, seed: int, n_values: int, none_share: float) -> None:
    """Also where many are equal, and some cannot come."""
    chance = np.random.default_rng(seed)
    logits = chance.integers(n_values, size=length).astype(np.float32)
    logits[chance.random(length) < none_share] = -np.inf
    found = likeliest(logits)
    assert len(set(found.tolist())) == CHOICES
    assert np.sort(logits[found])[::-1].tolist() == np.sort(logits)[::-1][:CHOICES].tolist()
