"""Whose guesses the next pass verifies, and how many: the most valuable ones of all, as far as that pays."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest

from edge_run.base.errors import KernelError
from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.decoding.padding import LEAST_TOKENS
from edge_run.runtime.speculation.drafting import Guess, Guesses, Pace, WantedGuesses, plan_tree
from edge_run.runtime.speculation.shared_drafters import CHEAP_TRIAL_TOKENS, OpenText, SharedDrafters
from edge_run.runtime.speculation.shared_guesses import SharedGuesses
from edge_run.runtime.speculation.tally import SpeculationTally
from edge_run.runtime.speculation.verification import Verification
from edge_run.runtime.speculation.width_control import WidthControl


class Fixed:
    """A draft model that guesses a chain for each text, each token of which has the same chance."""

    most_texts, once_s, reads_s = 8, 0.0, 0.0

    def __init__(self, chances: Mapping[int, float]) -> None:
        self.chances = chances
        self.read: list[list[int]] = []
        self.salts: dict[int, str] = {}

    def belong(self, number: int, salt: str) -> None:
        self.salts[number] = salt

    def n_unread(self, number: int, text: Sequence[int]) -> int:
        return 10 * CHEAP_TRIAL_TOKENS if number == 1 else number

    def draft_many(self, texts: Mapping[int, Sequence[int]], wanted: WantedGuesses) -> dict[int, Guesses]:
        self.read.append(sorted(texts))
        self.once_s = self.reads_s
        depths = range(1, wanted.most_depth + 1)
        return {
            number: {tuple(range(d)): Guess(self.chances[number] ** d, ("fixed", number, d), 0.5) for d in depths}
            for number in texts
        }


def guessing(chances: Mapping[int, float], compute_s: float = 0.0, least_tokens: int = 0) -> SharedGuesses:
    """Guesses for texts 0, 1, ... in passes that read for a second, and compute each token for `compute_s`."""
    costs = WidthCosts()
    for width in 2 * (1, 2, 4, 8, 16, 32):
        wall_s = max(1.0, compute_s * width)
        costs.observe(width, wall_s, wall_s - compute_s * width, 1.0, 10**9)
    control = WidthControl(costs, 32)
    found = SharedGuesses(
        control,
        SpeculationTally("draft", is_exact=least_tokens == LEAST_TOKENS),
        SharedDrafters(cast("Any", Fixed(chances)), uses_lookup=False),
        28,
        least_tokens=least_tokens,
        clock=lambda: 0.0,
    )
    for number in chances:
        found.begin(number)
    return found


def texts(n_texts: int, most_depth: int = 16) -> dict[int, OpenText]:
    return {number: OpenText([7, 8, number], number, most_depth) for number in range(n_texts)}


def widths(guesses: SharedGuesses, n_texts: int, most_depth: int = 16, n_cells: int = 100) -> list[int]:
    planned = guesses.plan(texts(n_texts, most_depth), n_cells)
    return [len(planned[number].tree) if number in planned else 1 for number in range(n_texts)]


def test_who_is_guessed_best_gets_most() -> None:
    good, fair, bad = widths(guessing({0: 0.95, 1: 0.6, 2: 0.01}), 3)
    assert good > 2 * fair > 2
    assert bad == 1
    assert good + fair + bad <= 32


def test_answers_go_on_without_guesses_where_guessing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    guesses = guessing({0: 0.95, 1: 0.95, 2: 0.95})

    def fail(*_: object) -> dict[int, Guesses]:
        raise KernelError("llama.cpp failed")

    with monkeypatch.context() as failing:
        failing.setattr(Fixed, "draft_many", fail)
        assert widths(guesses, 2) == [1, 1]
    assert widths(guesses, 2) == [1, 1], "nor later in these answers"
    assert guesses.figures_of(0).reason == "guessing failed: llama.cpp failed"
    assert guesses.figures_of(2).reason == ""
    guesses.end(0)
    guesses.end(1)
    for number in (0, 1):
        guesses.begin(number)
    assert min(widths(guesses, 2)) > 1


def test_the_draft_model_is_told_whom_a_text_is_for_before_it_reads() -> None:
    draft = Fixed({0: 0.9, 1: 0.9})
    drafters = SharedDrafters(cast("Any", draft), uses_lookup=False)
    asked = {5: OpenText([1, 2], 0, 4, "key a"), 6: OpenText([1, 3], 1, 4, "key b")}
    drafters.guess(asked, 4, Pace(), is_trial=True)
    assert draft.salts == {0: "key a", 1: "key b"}


def test_one_that_is_alone_gets_all_that_pays() -> None:
    assert widths(guessing({0: 0.95}), 1) == [16]


def test_one_that_is_alone_gets_all_at_once_when_it_begins_to_repeat_itself() -> None:
    guesses = guessing({0: 0.95})
    assert widths(guesses, 1, most_depth=1) == [2]
    assert widths(guesses, 1) == [16]


def test_what_a_pass_computes_beside_guesses_is_a_part_of_its_width() -> None:
    guesses = guessing({0: 0.95})
    wide = guesses.plan(texts(1), 100, n_beside=1)[0]
    assert (len(wide.tree), wide.n_beside) == (15, 1)
    narrow = guesses.plan(texts(1, most_depth=1), 100, n_beside=1)[0]
    assert (len(narrow.tree), narrow.n_beside) == (2, 0), "a guess comes first"


def test_a_guess_out_of_order_is_not_accepted_where_order_is_wanted() -> None:
    guesses = guessing({0: 0.9})
    found = {(1,): Guess(0.9, ("test", 0, 0), 0.9), (2,): Guess(0.5, ("test", 1, 0), 0.5)}
    rows = np.zeros((3, 5), np.float32)
    for token, wants_order, is_of_use in ((1, True, True), (2, False, True), (2, True, False)):
        verified = Verification(plan_tree(0, found), rows)
        before = guesses.figures_of(0).accepted
        assert guesses.follows(0, verified, token, wants_order=wants_order) == is_of_use
        assert guesses.figures_of(0).accepted - before == is_of_use
        assert verified.node == token


def test_what_is_foreseen_comes_before_all_guesses() -> None:
    guesses = guessing({0: 0.9}).drafters
    found = guesses.guess({0: OpenText([7, 8, 0], 0, 4, foreseen=(5, 6))}, 16, Pace(), is_trial=False)
    assert list(found[0]) == [(5,), (5, 6), (5, 6, 0), (5, 6, 0, 1)]
    values = [guess.value for guess in found[0].values()]
    assert values == sorted(values, reverse=True)
    alone = guesses.guess({0: OpenText([7, 8, 0], 0, 2, foreseen=(5, 6))}, 16, Pace(), is_trial=False)
    assert list(alone[0]) == [(5,), (5, 6)]


def test_the_next_answer_of_a_conversation_counts_from_zero_and_knows_the_noise() -> None:
    guesses = guessing({0: 0.9})
    guesses.passed(guesses.plan(texts(1), 100), [0], 1.0, 0.0, has_prompts=False)
    guesses.differed(0, 0.7)
    before = guesses.figures_of(0)
    guesses.begin(0)
    after = guesses.figures_of(0)
    assert (before.passes, after.passes, guesses.figures().passes) == (1, 0, 1)
    assert before.noise == after.noise == pytest.approx(0.7)


def test_no_guess_is_verified_where_computing_is_all_that_takes_time() -> None:
    assert widths(guessing({0: 0.3, 1: 0.3}, compute_s=2.0), 2) == [1, 1]


@pytest.mark.parametrize(("most_depth", "n_cells"), [(2, 100), (16, 3), (0, 100)])
def test_guesses_end_where_the_text_must_or_where_cells_do(most_depth: int, n_cells: int) -> None:
    found = widths(guessing({0: 0.95, 1: 0.95}), 2, most_depth, n_cells)
    assert max(found) <= 1 + most_depth
    assert sum(found) <= 2 + n_cells
    assert (sum(found) > 2) == (most_depth > 0)


@pytest.mark.parametrize("least_tokens", [1, LEAST_TOKENS])
def test_texts_with_cells_of_their_own_have_chains_of_one_length(least_tokens: int) -> None:
    guesses = guessing({0: 0.95, 1: 0.9, 2: 0.01}, least_tokens=least_tokens)
    assert widths(guesses, 3) == [8, 8, 1]  # but for one whose guesses are worth nothing: it gets padding
    assert guesses.offers.width_of([1, 1, 1]) == 3 * least_tokens  # padding
    assert guesses.offers.width_of([3, 1, 2]) == 9
    assert guesses.offers.width_of([3, 1, 2], 5) == 15, "those between are padded too"


@pytest.mark.parametrize("least_tokens", [1, LEAST_TOKENS])
def test_chains_are_no_longer_than_a_pass_has_room_for_with_the_sequences_between(least_tokens: int) -> None:
    guesses = guessing({0: 0.95, 1: 0.95, 7: 0.95}, least_tokens=least_tokens)
    apart = {0: OpenText([7, 8, 0], 0, 16), 1: OpenText([7, 8, 1], 7, 16)}
    found = guesses.plan(apart, 1000)
    assert max(len(one.tree) for one in found.values()) == 4, "8 sequences of 4 tokens are as many as a pass has"
    assert max(len(one.tree) for one in guesses.plan(texts(2), 1000).values()) > 4


def test_exact_passes_verify_the_guess_that_has_the_place_of_padding() -> None:
    assert widths(guessing({0: 0.3, 1: 0.3}, compute_s=2.0, least_tokens=LEAST_TOKENS), 2) == [2, 2]


def test_while_nothing_pays_the_draft_model_reads_no_long_texts() -> None:
    guesses = guessing({0: 0.01, 1: 0.01, 2: 0.01})
    draft = guesses.drafters._draft
    while len(draft.read) < 12 and [0, 2] not in draft.read:
        assert widths(guesses, 3) == [1, 1, 1]
    assert draft.read[0] == [0, 1, 2]
    assert draft.read[-1] == [0, 2]
    assert guesses.most_spare == 0


def test_where_passes_have_no_room_for_guesses_few_texts_are_read_before_they_paid() -> None:
    guesses = guessing({0: 0.01, 1: 0.01, 2: 0.01}, compute_s=2.0)
    draft = guesses.drafters._draft
    for _ in range(20):
        assert widths(guesses, 3) == [1, 1, 1]
    assert draft.read
    assert all(read == [0, 2] for read in draft.read)


def test_texts_are_read_for_a_trial_until_they_are_many_together() -> None:
    draft = Fixed(dict.fromkeys(range(8), 0.9))
    drafters = SharedDrafters(cast("Any", draft), uses_lookup=False)
    asked = {number: OpenText([1, 2], number, 4) for number in range(8)}
    draft.n_unread = lambda number, text: 24  # type: ignore[method-assign]
    draft.reads_s = 0.5
    drafters.guess(asked, 16, Pace(), is_trial=True)
    assert draft.read == [[0, 1]]
    assert drafters.once_s == 0.5
    draft.n_unread = lambda number, text: 1 if number < 2 else 24  # type: ignore[method-assign]
    drafters.guess(asked, 16, Pace(), is_trial=True)
    assert draft.read[-1] == [0, 1, 2, 3]
    draft.reads_s = 0.0
    drafters.guess(asked, 16, Pace(), is_trial=False)
    assert draft.read[-1] == list(range(8))
    assert drafters.once_s == 0.0


def test_that_a_text_is_looked_up_in_for_the_first_time_is_said() -> None:
    seconds = itertools.count()
    drafters = SharedDrafters(None, uses_lookup=True, clock=lambda: float(next(seconds)))
    asked = {0: OpenText([1, 2, 1, 2], 0, 4), 1: OpenText([1, 2], 1, 0)}
    drafters.guess(asked, 16, Pace(), is_trial=False)
    assert drafters.once_s == 1.0
    drafters.guess(asked, 16, Pace(), is_trial=False)
    assert drafters.once_s == 0.0
    drafters.begin(0)
    drafters.guess(asked, 16, Pace(), is_trial=False)
    assert drafters.once_s == 1.0, "another text of the same conversation"


def test_a_draft_model_rests_beside_the_first_texts_that_share_passes() -> None:
    costs, rests = WidthCosts(), list[int]()
    control = WidthControl(costs, 32)
    control.rest = lambda: rests.append(1)
    drafters = SharedDrafters(cast("Any", Fixed(dict.fromkeys(range(3), 0.9))), uses_lookup=False)
    found = SharedGuesses(control, SpeculationTally("draft"), drafters, 28)
    found.begin(0)
    found.plan(texts(1), 100)
    assert not rests, "one that is alone is guessed at soon"
    found.begin(1)
    assert len(rests) == 1
    costs.observe(64, 2.0, 1.0, 1.0, 10**9)
    found.begin(2)
    assert len(rests) == 1, "the others may be guessed at, and go on so"
    for _ in range(2):
        found.plan(texts(3), 100)
        costs.observe(3, 1.0, 0.9, 1.0, 10**9)
    assert len(rests) == 3, "it is not known what passes of three take"
    assert found.plan(texts(3), 100)
    assert len(rests) == 3


def test_what_is_not_verified_is_held_against_what_comes() -> None:
    guesses = guessing({0: 0.01, 1: 0.01})
    before = guesses.drafters.acceptance.chance(("fixed", 0, 1), 0.5)
    assert widths(guesses, 2) == [1, 1]
    plain = Verification(plan_tree(0, {}))
    assert not guesses.follows(0, plain, 0)  # as was guessed
    assert not guesses.follows(1, plain, 5)
    after = [guesses.drafters.acceptance.chance(("fixed", number, 1), 0.5) for number in (0, 1)]
    assert after[0] > before > after[1]


def test_figures_of_requests_add_up() -> None:
    guesses = guessing({0: 0.9, 1: 0.9})
    trees = guesses.plan(texts(2), 100)
    guesses.passed(trees, [0, 1], 1.0, 0.0, has_prompts=False)
    one, other = guesses.figures_of(0), guesses.figures_of(1)
    guesses.end(0)
    assert guesses.figures().drafted == one.drafted + other.drafted > 4
    assert guesses.figures().passes == 2
    assert guesses.figures_of(0).passes == 0
