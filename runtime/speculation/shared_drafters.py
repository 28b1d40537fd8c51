"""Who guesses for the texts of a pass: each text's own look-up, and a draft model that follows all of them.

The draft model's passes are shared as well. Where a pass has one text only, the draft model may go on beside it
(`overlap.py`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

from edge_run.base.protocols import Clock
from edge_run.base.results import TuningDecision
from edge_run.runtime.inspection.draft_file import MOST_DEPTH
from edge_run.runtime.speculation.draft_model import DraftModel
from edge_run.runtime.speculation.drafting import (
    Acceptance,
    DraftTree,
    Guess,
    Guesses,
    Pace,
    Path,
    WantedGuesses,
    merged,
)
from edge_run.runtime.speculation.lookup import Lookup
from edge_run.runtime.speculation.overlap import Overlap
from edge_run.runtime.speculation.verification import FORESEEN

CHEAP_TRIAL_TOKENS = 64  # of texts that the draft model has not read, while its guesses are only tried
_SURE = 0.99


@dataclass(frozen=True, slots=True)
class OpenText:
    """A text that the next pass adds a token to.

    tokens: the text, that token included.
    sequence: where it is.
    most_depth: as many tokens after it are of use.
    salt: what is read for it serves texts of the same salt only; None where the draft model was told already.
    foreseen: at most so many tokens that follow it surely, where always the likeliest one is chosen.
    """

    tokens: Sequence[int]
    sequence: int
    most_depth: int
    salt: str | None = ""
    foreseen: tuple[int, ...] = ()

    @property
    def ahead(self) -> OpenText:
        """The text after what is foreseen of it came."""
        if not self.foreseen:
            return self
        tokens, most_depth = [*self.tokens, *self.foreseen], self.most_depth - len(self.foreseen)
        return replace(self, tokens=tokens, most_depth=most_depth, foreseen=())


class SharedDrafters:
    """The drafters of requests, which go by their numbers. Not thread-safe.

    acceptance: how often guesses came true so far.
    once_s: of the latest guesses, the seconds that others do not take: texts were read first.
    """

    def __init__(self, draft: DraftModel | None, *, uses_lookup: bool, clock: Clock = time.monotonic) -> None:
        self.acceptance, self.once_s, self._clock = Acceptance(), 0.0, clock
        self._draft, self._uses_lookup = draft, uses_lookup
        self._overlap = Overlap(draft) if draft else None
        self._lookups = defaultdict[int, Lookup](Lookup)
        self._indexed = set[int]()  # the requests whose texts are, since they began

    @property
    def decisions(self) -> tuple[TuningDecision, ...]:
        """Whether guessing beside passes was found to pay, once that was compared."""
        return self._overlap.decisions if self._overlap else ()

    def begin(self, number: int) -> None:
        """A request begins, or the next text of a conversation, which may go on where the one before was alike."""
        self._indexed.discard(number)

    def end(self, number: int) -> None:
        """A request has ended."""
        self._lookups.pop(number, None)
        self._indexed.discard(number)

    def guess(
        self, texts: Mapping[int, OpenText], most_guesses: int, pace: Pace, *, is_trial: bool
    ) -> dict[int, Guesses]:
        """Return guesses of what follows `texts`, by requests.

        most_guesses and pace: see `WantedGuesses`, of all texts together.
        is_trial: they are only held against what comes, so that nothing long is read for them.
        """
        self.once_s = 0.0
        ahead = {number: text.ahead for number, text in texts.items()}
        depth = min(MOST_DEPTH, max(text.most_depth for text in ahead.values()))
        several = list[dict[int, Guesses]]()
        if depth > 0:
            wanted = WantedGuesses(depth, most_guesses, self.acceptance, pace)
            several = [self._drafted(ahead, wanted, is_trial=is_trial), self._looked_up(ahead, wanted)]
        return {
            number: self._behind(text.foreseen, merged([found[number] for found in several if number in found]))
            for number, text in texts.items()
        }

    def _drafted(self, texts: Mapping[int, OpenText], wanted: WantedGuesses, *, is_trial: bool) -> dict[int, Guesses]:
        """Return the draft model's guesses for those that it follows."""
        able = self._able(texts)
        followed = self._cheap(texts, able) if is_trial else able
        if not (self._draft and self._overlap and followed):
            return {}
        self._draft.once_s = 0.0  # it may have guessed beside the pass, and has nothing to do now
        if len(texts) == 1:
            (text,) = texts.values()
            found = {text.sequence: self._overlap.draft(text.tokens, wanted, text.sequence)}
        else:
            found = self._draft.draft_many({texts[n].sequence: texts[n].tokens for n in followed}, wanted)
        self.once_s += self._draft.once_s
        return {n: _within(found.get(texts[n].sequence, {}), texts[n].most_depth) for n in followed}

    def _looked_up(self, texts: Mapping[int, OpenText], wanted: WantedGuesses) -> dict[int, Guesses]:
        """Return what followed in the texts themselves."""
        found = dict[int, Guesses]()
        for number, text in texts.items() if self._uses_lookup else ():
            if text.most_depth > 0:
                started = self._clock()
                found[number] = self._lookups[number].draft(text.tokens, wanted.within(text.most_depth))
                if number not in self._indexed:
                    self._indexed.add(number)
                    self.once_s += self._clock() - started
        return found

    def _behind(self, foreseen: Path, guesses: Guesses) -> Guesses:
        """Return `guesses` of what follows `foreseen`, behind that."""
        if not foreseen:
            return guesses
        sure = self.acceptance.chance(FORESEEN, _SURE)
        found = {foreseen[:n]: Guess(sure**n, FORESEEN, _SURE) for n in range(1, 1 + len(foreseen))}
        for path, guess in guesses.items():
            found[foreseen + path] = replace(guess, value=guess.value * sure ** len(foreseen))
        return found

    @contextmanager
    def going_on(self, text: OpenText, tree: DraftTree) -> Iterator[None]:
        """Guess on along the main line of `tree` while the block computes it, if that pays."""
        if self._overlap is None:
            yield
            return
        with self._overlap.going_on([*text.tokens, *tree.tokens[1 : tree.main_length]]):
            yield

    @property
    def was_trial(self) -> bool:
        """See `Overlap.was_trial`."""
        return self._overlap is not None and self._overlap.was_trial

    def note_alone(self, guessing_s: float, pass_s: float, wait_s: float, width: int) -> None:
        """Note what guesses for a pass of one text and the pass took; see `Overlap.note`."""
        if self._overlap:
            self._overlap.note(guessing_s, pass_s, wait_s, width)

    def _able(self, texts: Mapping[int, OpenText]) -> list[int]:
        """Return the requests that the draft model can guess for."""
        if self._draft is None:
            return []
        able = [n for n, text in texts.items() if text.most_depth > 0 and text.sequence < self._draft.most_texts]
        for number in able:
            if (salt := texts[number].salt) is not None:
                self._draft.belong(texts[number].sequence, salt)
        return able

    def _cheap(self, texts: Mapping[int, OpenText], able: Sequence[int]) -> list[int]:
        """Return those of `able` that cost little to read, one at least: reading pays where guesses do.

        They are those of which the least is unread, as many as have `CHEAP_TRIAL_TOKENS` together.
        """
        if self._draft is None or len(able) < 2:
            return list(able)
        unread = {number: self._draft.n_unread(texts[number].sequence, texts[number].tokens) for number in able}
        order = sorted(able, key=unread.__getitem__)
        n_cheap = sum(total <= CHEAP_TRIAL_TOKENS for total in accumulate(map(unread.__getitem__, order)))
        return order[: max(1, n_cheap)]


def _within(guesses: Guesses, depth: int) -> Guesses:
    """Return those that are no deeper: the draft model guesses as deep for all texts, and beside a pass deeper."""
    return {path: guess for path, guess in guesses.items() if len(path) <= depth}
