"""Guesses of the texts of a pass, one or several: the pass is as wide as pays for all of them together.

Each text has the one token that is certain, and a tree of guesses of what follows it. The trees grow into one width: by
the guess that is most valuable of all that are not in a tree yet, whoever's it is (`drafting.py`). So a text that
repeats itself gets many guesses, and one that nobody can guess gets none. What is chosen is chosen as ever: each text
by its own sampler, from its own logits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from edge_run.base.errors import Cancelled, EdgeRunError
from edge_run.base.protocols import Clock
from edge_run.base.results import Speculation
from edge_run.runtime.speculation.drafting import DraftTree, Guess, Guesses, Path, RankedGuess, plan_tree, rank_guesses
from edge_run.runtime.speculation.pass_offers import PassOffers
from edge_run.runtime.speculation.shared_drafters import OpenText, SharedDrafters
from edge_run.runtime.speculation.tally import SpeculationTally
from edge_run.runtime.speculation.verification import FORESEEN, Verification
from edge_run.runtime.speculation.width_control import WidthControl


@dataclass(frozen=True, slots=True)
class SharedTree:
    """A tree of guesses, and the sequences of its branches: that of the text, and one for each further leaf.

    n_beside: as many tokens that are no guesses have room in the pass.
    """

    tree: DraftTree
    sequences: tuple[int, ...]
    n_beside: int = 0


@dataclass(slots=True)
class _Guessed:
    """A request that is guessed at. trial: guesses that are held against what comes, without being verified."""

    tally: SpeculationTally
    trial: Verification | None = None


class SharedGuesses:
    """Guesses for the requests of a batch, which go by their numbers, or for one conversation. Not thread-safe.

    control: decides how wide passes are.
    tally: counts the figures of all requests that have ended.
    drafters: guess.
    most_guesses: of a pass.
    branches: sequences for the branches of trees; none where guesses must be chains.
    least_tokens: see `PassOffers`.

    offers: what passes may be.
    """

    def __init__(
        self,
        control: WidthControl,
        tally: SpeculationTally,
        drafters: SharedDrafters,
        most_guesses: int,
        *,
        branches: Sequence[int] = (),
        least_tokens: int = 0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._control, self._ended, self.drafters, self._clock = control, tally, drafters, clock
        self.offers = PassOffers(control.most_tokens, least_tokens)
        self._most_guesses, self.branches = most_guesses, tuple(branches)
        self._guessed: dict[int, _Guessed] = {}
        self._n_taken = most_guesses  # of the last guesses: about as many are worth making again
        self._guessed_s = 0.0
        self._alone: tuple[OpenText, DraftTree] | None = None  # what the next pass verifies, where it has no other

    @property
    def most_spare(self) -> int:
        """The guesses that the next pass may have."""
        return self._most_guesses if self._control.is_on else 0

    def begin(self, number: int) -> None:
        """A request's answer begins; in a conversation it may be the next one, of the same number."""
        if self._guessed.keys() - {number}:
            self._control.begin_beside()
        else:
            self._control.begin()
            self.drafters.acceptance.forget(FORESEEN)  # it may be sampled otherwise
        self.drafters.begin(number)
        if before := self._guessed.get(number):
            self._ended.absorb(before.tally)
        self._guessed[number] = _Guessed(self._ended.of_another())

    def end(self, number: int) -> None:
        """A request has ended, for whatever reason."""
        self.drafters.end(number)
        if guessed := self._guessed.pop(number, None):
            self._ended.absorb(guessed.tally)

    def figures_of(self, number: int) -> Speculation:
        """Return the figures of a request that has not ended."""
        guessed = self._guessed.get(number)
        return self._told(guessed.tally if guessed else self._ended.of_another())

    def figures(self) -> Speculation:
        """Return the figures of all requests so far."""
        tally = self._ended.of_another()
        for one in (self._ended, *(guessed.tally for guessed in list(self._guessed.values()))):
            tally.absorb(one)
        return self._told(tally)

    def plan(self, texts: Mapping[int, OpenText], n_cells: int, n_beside: int = 0) -> dict[int, SharedTree]:
        """Return the trees that the next pass verifies, by requests; a request that has none is left out.

        texts: all that the pass computes, by requests.
        n_cells: the cells that guesses may take.
        n_beside: as many tokens are to have a place as well in a pass with guesses, if it is wide enough.
        """
        ranked = self._ranked(texts, n_cells)
        offers = self.offers.of(texts, ranked)
        choice = self._control.best([offer for offer, _ in offers]) if ranked else 0
        (width, _), taken = offers[choice]
        n_beside = n_beside if len(taken) > n_beside else 0
        taken = taken[: len(taken) - n_beside]
        if taken or not self._control.is_on:
            self._n_taken = len(taken)
        chosen, tried = _of_each(taken), {} if taken else _of_each(ranked)
        for number, text in texts.items():
            guessed, own = self._guessed[number], chosen.get(number, {})
            if ranked:  # what is not verified is held against what comes
                guessed.trial = Verification(plan_tree(text.tokens[-1], tried[number])) if number in tried else None
            if self._control.plain_s(width) is not None:
                expected_s = self._control.expected_s(width, is_guessed=bool(taken))
                guessed.tally.planned(1 + sum(guess.value for guess in own.values()), expected_s)
            guessed.tally.decided(is_on=self._control.is_on)
        trees = {n: plan_tree(text.tokens[-1], chosen[n]) for n, text in texts.items() if n in chosen}
        self._alone = None
        if trees and len(texts) == 1:
            (text,), (tree,) = texts.values(), trees.values()
            self._alone = text, tree
        return _with_branches(texts, trees, self.branches, n_beside)

    def _ranked(self, texts: Mapping[int, OpenText], n_cells: int) -> list[RankedGuess]:
        """Return guesses for the next pass, in the order in which they are taken; none where none is wanted.

        Of several texts twice as many as before are enough; one that is alone may repeat itself at length at any time.
        """
        n_texts = len(texts)
        most = min(self._most_guesses, self.offers.most_tokens - n_texts, n_cells)
        if n_texts > 1:
            most = min(most, 2 * (self._n_taken + n_texts))
        has_room = most > 0 and any(text.most_depth > 0 for text in texts.values())
        has_failed = any(self._guessed[number].tally.has_given_up for number in texts)
        if not has_room or has_failed or not self._control.wants_guesses(self.offers.hoped(texts, most)):
            return []
        started = self._clock()
        ranked = rank_guesses(self._drafted(texts, most), len(self.branches))[:most]
        self._guessed_s = self._clock() - started
        if ranked:  # where there was none to be made, what that took says nothing of others
            self._control.observe_drafting(self._guessed_s, once_s=self.drafters.once_s)
        for number in texts:
            self._guessed[number].tally.drafted(self._guessed_s)
        return ranked

    def _drafted(self, texts: Mapping[int, OpenText], most: int) -> Mapping[int, Guesses]:
        """Return what the drafters guess; where one fails, nothing, and from then on in these answers."""
        try:
            return self.drafters.guess(texts, most, self._control.pace, is_trial=not self._control.is_on)
        except Cancelled:
            raise
        except EdgeRunError as error:
            for number in texts:
                self._guessed[number].tally.gave_up(error)
            return {}

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Guess on while the block computes the pass that was planned, if it is of one text and that pays."""
        alone, self._alone = self._alone, None
        with self.drafters.going_on(*alone) if alone else nullcontext():
            yield

    def observe_pass(self, width: int, wall_s: float, wait_s: float, read_s: float, read_bytes: int) -> None:
        """Note a pass, see `WidthCosts.observe`. For those of a batch its `PassWidths` do."""
        if not self.drafters.was_trial:  # such a pass says nothing of those to come
            self._control.observe_pass(width, wall_s, wait_s, read_s, read_bytes)

    def differed(self, number: int, difference: float) -> None:
        """Note how far the logits of a token of a request differed between two widths."""
        self._guessed[number].tally.differed(difference)

    def passed(
        self,
        trees: Mapping[int, SharedTree],
        numbers: Sequence[int],
        wall_s: float,
        wait_s: float,
        *,
        has_prompts: bool,
    ) -> None:
        """Note what a pass took that added a token to the texts of `numbers`, and verified `trees`.

        wait_s: of that, waiting for weights. has_prompts: prompts were read in it, so that it took longer.
        """
        plain = self.offers.width_of([1] * len(numbers)) if numbers else 0
        plain_s = wall_s if has_prompts else self._control.plain_s(plain) or wall_s
        for number in numbers:
            width = len(trees[number].tree) if number in trees else 1
            self._guessed[number].tally.passed(width, wall_s, plain_s)
        if trees and len(numbers) == 1:
            self.drafters.note_alone(self._guessed_s, wall_s, wait_s, len(trees[numbers[0]].tree))

    def follows(self, number: int, found: Verification, token: int, *, wants_order: bool = False) -> bool:
        """Note that `token` comes next in the text of a request, of which `found` was computed.

        wants_order: the logits after it are of no use but where it lies in the cache in the order of the text.

        Returns whether those were computed, and are of use; `found` has come to them where they were computed.
        """
        guessed = self._guessed[number]
        if guessed.trial and not guessed.trial.follows(token, self.drafters.acceptance, guessed.tally):
            guessed.trial = None
        if len(found.tree) == 1:
            return False
        guessed.tally.looked_at(found.row)
        is_guessed = found.follows(token, self.drafters.acceptance, guessed.tally)
        is_of_use = is_guessed and (not wants_order or found.is_in_order)
        if is_of_use:
            guessed.tally.accepted()
        return is_of_use

    def _told(self, tally: SpeculationTally) -> Speculation:
        return replace(tally.figures(), decisions=self.drafters.decisions)


def _with_branches(
    texts: Mapping[int, OpenText], trees: Mapping[int, DraftTree], branches: Sequence[int], n_beside: int
) -> dict[int, SharedTree]:
    """Give each leaf of a tree one of `branches`, but the first, which has the text's own sequence."""
    free, found = list(branches), {}
    for number, tree in trees.items():
        n_more = tree.n_leaves - 1
        found[number] = SharedTree(tree, (texts[number].sequence, *free[:n_more]), n_beside)
        del free[:n_more]
    return found


def _of_each(ranked: Sequence[RankedGuess]) -> dict[int, dict[Path, Guess]]:
    """Return the guesses of each text that has some, in their order."""
    found: dict[int, dict[Path, Guess]] = {}
    for number, path, guess in ranked:
        found.setdefault(number, {})[path] = guess
    return found
