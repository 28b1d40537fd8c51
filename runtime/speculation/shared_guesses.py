"""Guesses of several texts that share a pass: merged by value, the pass is as wide as pays for all of them together.

Each text has the one token that is certain, and a tree of guesses of what follows it. The trees grow into one width: by
the guess that is most valuable of all that are not in a tree yet, whoever's it is, as the tree of a single text does
(`drafting.py`). So a text that repeats itself gets many guesses, and one that nobody can guess gets none. What is
chosen is chosen as ever: each text by its own sampler, from its own logits.

Where each text has cells of its own, it has as many tokens in a pass as every other one, padding included
(`runtime/decoding/padding.py`): guesses are chains of one length. In exact passes it has two at least, and the first
guess of each costs nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from edge_run.base.errors import Cancelled, EdgeRunError
from edge_run.base.protocols import Clock
from edge_run.base.results import Speculation
from edge_run.runtime.decoding.padding import padded_width
from edge_run.runtime.speculation.drafting import DraftTree, Guess, Guesses, Path, plan_tree, rank_guesses
from edge_run.runtime.speculation.shared_drafters import OpenText, SharedDrafters
from edge_run.runtime.speculation.tally import SpeculationTally
from edge_run.runtime.speculation.verification import Verification
from edge_run.runtime.speculation.width_control import WIDTHS, Offer, WidthControl

HOPED_CHANCE = 0.6  # of a guess that is not made yet


@dataclass(frozen=True, slots=True)
class SharedTree:
    """A tree of guesses, and the sequences of its branches: that of the text, and one for each further leaf."""

    tree: DraftTree
    sequences: tuple[int, ...]


@dataclass(slots=True)
class _Guessed:
    """A request that is guessed at. trial: guesses that are held against what comes, without being verified."""

    tally: SpeculationTally
    trial: Verification | None = None


class SharedGuesses:
    """Guesses for the requests of a batch, which go by their numbers. Not thread-safe.

    control: decides how wide passes are.
    tally: counts the figures of all requests that have ended.
    drafters: guess.
    most_guesses: of a pass.
    branches: sequences for the branches of trees; none where guesses must be chains.
    least_tokens: of each text in a pass, where all have as many, padding included; 0: each has what it needs.
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
        self._most_guesses, self._branches, self._least_tokens = most_guesses, branches, least_tokens
        self._guessed: dict[int, _Guessed] = {}
        self._n_taken = most_guesses  # of the last guesses: about as many are worth making again
        self._guessed_s = 0.0
        self._alone: tuple[OpenText, DraftTree] | None = None  # what the next pass verifies, where it has no other

    @property
    def most_spare(self) -> int:
        """The guesses that the next pass may have."""
        return self._most_guesses if self._control.is_on else 0

    def begin(self, number: int) -> None:
        """A request's answer begins."""
        if self._guessed:
            self._control.begin_beside()
        else:
            self._control.begin()
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

    def plan(self, texts: Mapping[int, OpenText], n_cells: int) -> dict[int, SharedTree]:
        """Return the trees that the next pass verifies, by requests; a request that has none is left out.

        texts: all that the pass computes, by requests. n_cells: the cells that guesses may take.
        """
        n_texts = len(texts)
        most = min(self._most_guesses, self._control.most_tokens - n_texts, n_cells, 2 * (self._n_taken + n_texts))
        guesses: Mapping[Path, Guess] = {}
        ranked: list[Path] = []
        has_failed = any(self._guessed[number].tally.has_given_up for number in texts)
        if most > 0 and not has_failed and self._control.wants_guesses(self._hoped(texts, most)):
            started = self._clock()
            guesses = self._drafted(texts, most)
            ranked = rank_guesses(guesses, n_texts + len(self._branches), [(number,) for number in texts])[:most]
            self._note_drafting(texts, self._clock() - started, has_guesses=bool(guesses))
        offers = self._offers(texts, ranked)
        worth = [n_texts + sum(guesses[path].value for path in paths) for _, paths in offers]
        choice = 0
        if ranked:
            choice = self._control.best([(width, value) for (width, _), value in zip(offers, worth, strict=True)])
        width, taken = offers[choice]
        if taken or not self._control.is_on:
            self._n_taken = len(taken)
        trees = {number: _tree_of(number, text, guesses, taken) for number, text in texts.items()}
        for number, text in texts.items():
            guessed = self._guessed[number]
            if ranked:  # what is not verified is held against what comes
                guessed.trial = None if taken else Verification(_tree_of(number, text, guesses, ranked))
            value = sum(guess.value for guess in trees[number].guesses if guess)
            if self._control.plain_s(width) is not None:
                guessed.tally.planned(1 + value, self._control.expected_s(width, is_guessed=bool(taken)))
            guessed.tally.decided(is_on=self._control.is_on)
        if taken and n_texts == 1:
            (text,), (tree,) = texts.values(), trees.values()
            self._alone = text, tree
        return self._with_branches(texts, trees)

    def _drafted(self, texts: Mapping[int, OpenText], most: int) -> Guesses:
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

    def width_of(self, n_tokens: Sequence[int], n_sequences: int = 0) -> int:
        """Return how wide a pass is in which texts have so many tokens each.

        n_sequences: from the first of theirs to the last; those between are padded too. 0: they have all of them.
        """
        n_sequences = n_sequences or len(n_tokens)
        return padded_width(n_tokens, n_sequences, self._least_tokens) if self._least_tokens else sum(n_tokens)

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
        plain = self.width_of([1] * len(numbers)) if numbers else 0
        plain_s = wall_s if has_prompts else self._control.plain_s(plain) or wall_s
        for number in numbers:
            width = len(trees[number].tree) if number in trees else 1
            self._guessed[number].tally.passed(width, wall_s, plain_s)
        if trees and len(numbers) == 1:
            self.drafters.note_alone(self._guessed_s, wall_s, wait_s, len(trees[numbers[0]].tree))

    def follows(self, number: int, found: Verification, token: int) -> bool:
        """Note that `token` comes next in the text of a request, of which `found` was computed; return whether it was.

        `found` goes on to the logits after it then.
        """
        guessed = self._guessed[number]
        if guessed.trial and not guessed.trial.follows(token, self.drafters.acceptance, guessed.tally):
            guessed.trial = None
        if len(found.tree) == 1:
            return False
        guessed.tally.looked_at(found.row)
        is_guessed = found.follows(token, self.drafters.acceptance, guessed.tally)
        if is_guessed:
            guessed.tally.accepted()
        return is_guessed

    def _told(self, tally: SpeculationTally) -> Speculation:
        return replace(tally.figures(), decisions=self.drafters.decisions)

    def _offers(self, texts: Mapping[int, OpenText], ranked: Sequence[Path]) -> list[tuple[int, Sequence[Path]]]:
        """Return what the next pass may be: how wide, and with which of `ranked`; the first is without guesses."""
        n_texts, n_sequences = len(texts), span_of(text.sequence for text in texts.values())
        if not self._least_tokens:
            most = min(self._control.most_tokens, n_texts + len(ranked))
            widths = [n_texts, *(width for width in WIDTHS if n_texts < width <= most)]
            return [(width, ranked[: width - n_texts]) for width in widths]
        most, longest = self._control.most_tokens // n_sequences, 1 + max((len(path) - 1 for path in ranked), default=0)
        lengths = [length for length in WIDTHS if 1 < length <= min(most, longest)]
        chains = [(n_sequences * length, [path for path in ranked if len(path) <= length]) for length in lengths]
        return [(self.width_of([1] * n_texts, n_sequences), ()), *chains]

    def _hoped(self, texts: Mapping[int, OpenText], most: int) -> Sequence[Offer]:
        """Return what the next pass may be with so many guesses, if guesses come true as often as may be hoped for."""
        depths = range(1, 1 + max(text.most_depth for text in texts.values()))
        paths = ((number, *range(depth)) for depth in depths for number in texts if depth <= texts[number].most_depth)
        offers = self._offers(texts, list(itertools.islice(paths, most)))
        return [(width, len(texts) + sum(HOPED_CHANCE ** (len(path) - 1) for path in taken)) for width, taken in offers]

    def _note_drafting(self, texts: Mapping[int, OpenText], seconds: float, *, has_guesses: bool) -> None:
        """Note what guesses took; where there was none to be made, that says nothing of others."""
        self._guessed_s = seconds
        if has_guesses:
            self._control.observe_drafting(seconds, once_s=self.drafters.once_s)
        for number in texts:
            self._guessed[number].tally.drafted(seconds)

    def _with_branches(self, texts: Mapping[int, OpenText], trees: Mapping[int, DraftTree]) -> dict[int, SharedTree]:
        """Give each leaf of a tree a sequence, but the first, which has the text's own."""
        free, found = list(self._branches), {}
        for number, tree in trees.items():
            if len(tree) > 1:
                n_more = tree.n_leaves - 1
                found[number] = SharedTree(tree, (texts[number].sequence, *free[:n_more]))
                del free[:n_more]
        return found


def span_of(sequences: Iterable[int]) -> int:
    """Return how many sequences there are from the first to the last of `sequences`; 0 where there are none."""
    found = list(sequences)
    return max(found) - min(found) + 1 if found else 0


def _tree_of(number: int, text: OpenText, guesses: Mapping[Path, Guess], paths: Sequence[Path]) -> DraftTree:
    """Return the tree of those of `paths` that begin with `number`, after the last token of `text`."""
    own = [path for path in paths if path[0] == number]
    return plan_tree(text.tokens[-1], {path[1:]: guesses[path] for path in own}, [path[1:] for path in own])
