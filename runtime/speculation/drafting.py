"""Guesses of what comes next, and the tree of them that one pass verifies. Pure.

A guess is a path: the tokens that may follow the conversation, one after the other. Its value is the chance that the
target goes that way, the product of the chances of its tokens. Of all guesses the most valuable are taken, as many as
the pass is wide: that is the tree with the most expected tokens (Svirschevski et al., SpecExec, 2024; Wang et al.,
OPT-Tree, 2024), since a path is never worth more than its beginning. Chances are the drafter's own, corrected by how
often such guesses came true here (`Acceptance`), where those two papers take them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from edge_run.base.protocols import BatchToken

Path = tuple[int, ...]
Kind = tuple[str, int, int]
"""What a guess is judged by: who made it, and two numbers of the guesser's own."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A path's last token. value: the chance of the path. prior: of its last token, before correction, and its kind."""

    value: float
    kind: Kind
    prior: float


Guesses = Mapping[Path, Guess]
"""Of one text."""


class RankedGuess(NamedTuple):
    """One that has its place among the guesses of all texts of a pass. number: of its text."""

    number: int
    path: Path
    guess: Guess


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast texts come while guesses are made, which what these take is held against.

    tokens_per_s: of the texts together; 0: that is not known, and all guesses are worth making.
    guess_s: by so much each guess makes the pass longer that verifies it.
    """

    tokens_per_s: float = 0.0
    guess_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WantedGuesses:
    """What guesses are of use.

    most_depth: of a path at most, in tokens.
    most_guesses: how many can be verified; more may be made.
    acceptance: how often such guesses came true.
    pace: what takes longer than it is likely to gain is not guessed.
    """

    most_depth: int
    most_guesses: int
    acceptance: Acceptance
    pace: Pace = Pace()

    def within(self, depth: int) -> WantedGuesses:
        """Return the same for a text in which paths of at most `depth` tokens are of use."""
        return self if depth >= self.most_depth else replace(self, most_depth=depth)


class Acceptance:
    """How often guesses of each kind came true. Not thread-safe.

    A chance is the rate that was seen, counted together with `PRIOR_TRIALS` trials at the drafter's own rate. That one
    is first corrected by how far all guesses of its maker came true, so that a bad drafter is known after a few; before
    any did, `MAKER_TRUST` of what it says is believed, with the weight of `MAKER_TRIALS`.
    """

    PRIOR_TRIALS = 4.0
    MAKER_TRIALS, MAKER_TRUST = 1.0, 0.75  # drafters are surer than they are right
    HIGHEST = 0.98
    MOST_TRIALS = 400.0  # then older ones count half: text changes

    def __init__(self) -> None:
        self._kinds: dict[Kind, list[float]] = {}
        self._makers: dict[str, list[float]] = {}

    def chance(self, kind: Kind, prior: float) -> float:
        """Return how likely a guess of this kind comes true, which its maker gives the chance `prior`."""
        hits, expected = self._makers.get(kind[0], (0.0, 0.0))
        trust = (hits + self.MAKER_TRUST * self.MAKER_TRIALS) / (expected + self.MAKER_TRIALS)
        seen, trials = self._kinds.get(kind, (0.0, 0.0))
        return (seen + self.PRIOR_TRIALS * min(self.HIGHEST, prior * trust)) / (trials + self.PRIOR_TRIALS)

    def observe(self, guess: Guess, is_hit: bool) -> None:
        """Note whether `guess` came true, where what is before it did."""
        self._count(self._makers.setdefault(guess.kind[0], [0.0, 0.0]), is_hit, guess.prior)
        self._count(self._kinds.setdefault(guess.kind, [0.0, 0.0]), is_hit, 1.0)

    def forget(self, kind: Kind) -> None:
        """Leave what was seen of guesses of this kind, and of their maker."""
        self._makers.pop(kind[0], None)
        self._kinds.pop(kind, None)

    def _count(self, entry: list[float], is_hit: bool, amount: float) -> None:
        entry[0] += is_hit
        entry[1] += amount
        if entry[1] > self.MOST_TRIALS:
            entry[:] = [value / 2 for value in entry]


@dataclass(frozen=True, slots=True)
class DraftTree:
    """What one pass verifies after its first token: node 0 is that token, the others guesses, parents first.

    The nodes of the main line, which follows the best guess from the first token on, come before all others: they lie
    in the cache where they would lie without speculation. children[i]: of node i, by token. guesses[0] is None.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    guesses: tuple[Guess | None, ...]
    children: tuple[Mapping[int, int], ...]
    main_length: int

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_leaves(self) -> int:
        """How many ways there are from the first token to an end."""
        return sum(not below for below in self.children)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the first token to `node`, both included."""
        nodes = [node]
        while nodes[-1]:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]

    def sequences(self) -> list[tuple[int, ...]]:
        """Return which branches each node belongs to: 0 is the main line, then one for every other leaf."""
        branches: list[set[int]] = [set() for _ in self.tokens]
        leaves = [node for node in range(len(self)) if not self.children[node]]
        for branch, leaf in enumerate(leaves):
            for node in self.path(leaf):
                branches[node].add(branch)
        return [tuple(sorted(numbers)) for numbers in branches]

    def batch(self, start: int, sequences: Sequence[int]) -> list[BatchToken]:
        """Return the tokens of a pass that computes it from position `start` on, all of whose logits are wanted.

        sequences: that of the text, where the main line goes on, and one for each further leaf; they hold the text too.
        """
        batch = []
        for token, depth, branches in zip(self.tokens, self.depths, self.sequences(), strict=True):
            first, *others = (sequences[branch] for branch in branches)
            batch.append(BatchToken(token, start + depth, first, True, tuple(others)))
        return batch


def rank_guesses(guesses: Mapping[int, Guesses], most_branches: int) -> list[RankedGuess]:
    """Return guesses, by the numbers of their texts, in the order in which growing trees take them.

    Every path comes after its beginning. The trees have at most `most_branches` leaves together beside their first
    ones; with none they are chains.
    """
    order = sorted(
        (-guess.value, len(path), RankedGuess(number, path, guess))
        for number, own in guesses.items()
        for path, guess in own.items()
    )
    taken: dict[int, set[Path]] = {number: {()} for number in guesses}
    with_child: dict[int, set[Path]] = {number: set() for number in guesses}
    n_branches, ranked = 0, list[RankedGuess]()
    for _, _, one in order:
        number, path, _ = one
        parent = path[:-1]
        is_branch = parent in with_child[number]
        if parent not in taken[number] or n_branches + is_branch > most_branches:
            continue
        n_branches += is_branch
        with_child[number].add(parent)
        taken[number].add(path)
        ranked.append(one)
    return ranked


def plan_tree(first: int, guesses: Guesses) -> DraftTree:
    """Return the tree of guesses of what follows the token `first`; each of them comes after its beginning."""
    below: dict[Path, list[Path]] = {}
    for path in guesses:
        below.setdefault(path[:-1], []).append(path)
    main: list[Path] = [()]
    while main[-1] in below:
        main.append(below[main[-1]][0])
    on_main = frozenset(main)
    order = [*main, *(path for path in guesses if path not in on_main)]
    place = {path: number for number, path in enumerate(order)}
    return DraftTree(
        tokens=(first, *(path[-1] for path in order[1:])),
        parents=(0, *(place[path[:-1]] for path in order[1:])),
        depths=tuple(map(len, order)),
        guesses=(None, *(guesses[path] for path in order[1:])),
        children=tuple({path[-1]: place[path] for path in below.get(parent, ())} for parent in order),
        main_length=len(main),
    )


def merged(several: Sequence[Guesses]) -> Guesses:
    """Return all guesses in one; of a path that two drafters guess, the more valuable guess."""
    if len(several) < 2:
        return several[0] if several else {}
    best: dict[Path, Guess] = {}
    for guesses in several:
        for path, guess in guesses.items():
            if path not in best or best[path].value < guess.value:
                best[path] = guess
    for path in sorted(best, key=len):  # a beginning that another drafter valued less is worth at least what follows
        parent = best.get(path[:-1])
        if parent and parent.value < best[path].value:
            best[path] = Guess(parent.value, best[path].kind, best[path].prior)
    return best
