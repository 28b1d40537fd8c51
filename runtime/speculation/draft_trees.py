"""Trees of guesses that a draft model grows, level by level, of several texts at once.

While they grow, a path begins with the number of its text, which is also the sequence that the text is in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from edge_run.base.errors import KernelError
from edge_run.base.protocols import BatchToken, Clock, Decoder, Logits
from edge_run.partition.width_costs import SLOPE, WidthCurve
from edge_run.runtime.speculation.drafting import Acceptance, Guess, Guesses, Pace, Path, WantedGuesses

CHOICES = 6  # tokens considered after each guess
COLUMNS = 1024  # that a vocabulary is laid out in, to find the likeliest tokens in a few of them
LEAST_VALUE = 0.004
TIMED_EVERY = 16  # trees, at least: what a level takes changes with what else a device does
_RATES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)


class DraftTrees:
    """Grows trees in a decoder, as far as they are worth their time. Not thread-safe.

    branches: sequences for all paths but the first of each text, which goes on in the text's own.
    beam: the guesses that are followed up at once, of all texts together.
    n_usable: the tokens of the vocabulary that may be guessed.
    end: ends the growing early, once it is set.
    """

    def __init__(
        self, decoder: Decoder, branches: Sequence[int], beam: int, n_usable: int, clock: Clock = time.monotonic
    ) -> None:
        self._decoder, self.branches, self._beam, self._clock = decoder, branches, beam, clock
        self._level_s, self._n_untimed = WidthCurve(), 0
        self.n_usable = n_usable
        self.end: threading.Event | None = None

    def grow(self, lengths: Mapping[int, int], rows: Logits, n_cells: int, wanted: WantedGuesses) -> dict[int, Guesses]:
        """Return likely continuations of texts, by their numbers.

        lengths: of the texts, by their numbers.
        rows: the logits after each.
        n_cells: the cells that guesses may take.

        A level follows up the most valuable guesses of the one before, as many as the beam is wide, as long as they are
        among the best of all, as many as are wanted, and worth the time that it takes.
        """
        self._n_untimed += 1
        guesses: dict[Path, Guess] = {}
        frontier: dict[Path, int] = {(number,): number for number in lengths}
        for depth in range(1, wanted.most_depth + 1):
            level: list[Path] = []
            for path, logits in zip(frontier, rows, strict=True):
                value = guesses[path].value if path in guesses else 1.0
                for token, guess in self._choices(logits, value, wanted.acceptance):
                    guesses[(*path, token)] = guess
                    level.append((*path, token))
            worst = sorted((guess.value for guess in guesses.values()), reverse=True)[: wanted.most_guesses][-1]
            least = max(LEAST_VALUE, worst if len(guesses) >= wanted.most_guesses else 0.0)
            level = sorted((path for path in level if guesses[path].value >= least), key=lambda p: -guesses[p].value)
            level = self._worth(self._followed(level), guesses, wanted.pace)
            n_cells -= len(level)
            if not level or depth == wanted.most_depth or n_cells < 0 or (self.end and self.end.is_set()):
                break
            frontier, started = self._branch(level, frontier), self._clock()
            rows = self._decoder.decode(
                [BatchToken(p[-1], lengths[p[0]] + depth - 1, sequence, True) for p, sequence in frontier.items()]
            )
            if not self.end:  # else it has one core, beside a pass
                self._level_s.observe(len(frontier), self._clock() - started)
                self._n_untimed = 0
        return {number: _of_text(number, guesses) for number in lengths}

    def _followed(self, level: Sequence[Path]) -> list[Path]:
        """Return the paths of `level` that are followed up: the first ones; where none can branch, one of each text."""
        if self.branches:
            return list(level[: min(self._beam, len(self.branches))])
        best = {path[0]: path for path in reversed(level)}.values()
        return [path for path in level if path in best]

    def _worth(self, level: Sequence[Path], guesses: Mapping[Path, Guess], pace: Pace) -> list[Path]:
        """Return as many of the first paths of `level` as gain more tokens than come in the time that they take.

        A path that is followed up is taken to gain a token where the text goes that way, for one more to be verified.
        """
        if not self._level_s:
            return list(level)
        gained = [0.0, *accumulate(guesses[path].value for path in level)]
        seconds = [0.0, *(self._level_s.at(n, _computing) + n * pace.guess_s for n in range(1, len(level) + 1))]
        n_worth = max(range(len(gained)), key=lambda n: gained[n] - pace.tokens_per_s * seconds[n])
        return list(level[: max(n_worth, self._n_untimed > TIMED_EVERY)])

    def _branch(self, level: Sequence[Path], frontier: Mapping[Path, int]) -> dict[Path, int]:
        """Return the sequence of each path of `level`, which follow those of `frontier`, in their sequences.

        The first that follows a path goes on in its sequence; each other one gets one that nobody goes on in.
        """
        parents = {path[:-1] for path in level}
        taken = {frontier[parent] for parent in parents}
        free = [number for number in self.branches if number not in taken]
        grown: dict[Path, int] = {}
        for path in level:
            sequence = frontier[path[:-1]]
            if sequence in grown.values():
                new = free.pop()
                self._decoder.branch(sequence, [new])
                sequence = new
            grown[path] = sequence
        return grown

    def _choices(self, logits: Logits, value: float, acceptance: Acceptance) -> Iterator[tuple[int, Guess]]:
        """Return the likeliest tokens after a path of `value`, likeliest first. Raises KernelError where none is."""
        usable = logits[: self.n_usable]
        highest = float(usable.max())
        if not np.isfinite(highest):  # a single one that is no number would spoil all that is known of guesses
            raise KernelError("draft model: gave logits that are not numbers; copy or download it again")
        best = likeliest(usable)
        best = best[np.argsort(-usable[best], kind="stable")]
        rates = np.exp(usable[best] - highest) / float(np.exp(usable - highest).sum())
        for rank, (token, rate) in enumerate(zip(best.tolist(), rates.tolist(), strict=True)):
            kind = ("draft", rank, sum(rate > edge for edge in _RATES))
            yield token, Guess(value * acceptance.chance(kind, rate), kind, rate)


def _of_text(number: int, guesses: Mapping[Path, Guess]) -> Guesses:
    """Return the guesses whose paths begin with `number`, without it."""
    return {path[1:]: guess for path, guess in guesses.items() if path[0] == number}


def likeliest(logits: Logits) -> NDArray[np.intp]:
    """Return the CHOICES tokens with the highest logits, which are numbers; in no order, and any of equal ones.

    Laid out in columns, they lie in as many of them: those whose own highest logits are the highest. To sort these by
    parts takes a fraction of what it takes with the whole of a large vocabulary.
    """
    end = len(logits) - len(logits) % COLUMNS
    if not end:
        return np.argpartition(logits, -CHOICES)[-CHOICES:]
    highest = logits[:end].reshape(-1, COLUMNS).max(axis=0)
    columns = np.argpartition(highest, -CHOICES)[-CHOICES:]
    tokens = np.append(np.add.outer(np.arange(0, end, COLUMNS), columns), np.arange(end, len(logits)))
    return tokens[np.argpartition(logits[tokens], -CHOICES)[-CHOICES:]]


def _computing(width: int) -> float:
    """Return about how long a level of `width` paths takes, beside one of a single path."""
    return 1 + SLOPE * (width - 1)
