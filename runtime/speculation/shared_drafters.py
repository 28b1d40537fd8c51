"""Who guesses for the texts of a pass: each text's own look-up, and a draft model that follows all of them.

The draft model's passes are shared as well. Where a pass has one text only, the draft model may go on beside it
(`overlap.py`).
"""

from __future__ import annotations

import time
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
        self._lookups: dict[int, Lookup] = {}
        self._looked_up: set[int] = set()  # the requests whose texts are indexed, since they began

    @property
    def decisions(self) -> tuple[TuningDecision, ...]:
        """Whether guessing beside passes was found to pay, once that was compared."""
        return self._overlap.decisions if self._overlap else ()

    def begin(self, number: int) -> None:
        """A request begins, or the next text of a conversation, which may go on where the one before was alike."""
        self._looked_up.discard(number)

    def end(self, number: int) -> None:
        """A request has ended."""
        self._lookups.pop(number, None)
        self._looked_up.discard(number)

    def guess(self, texts: Mapping[int, OpenText], most_guesses: int, pace: Pace, *, is_trial: bool) -> Guesses:
        """Return guesses of what follows `texts`, each path with the number of its request before it.

        most_guesses and pace: see `WantedGuesses`, of all texts together.
        is_trial: they are only held against what comes, so that nothing long is read for them.
        """
        self.once_s = 0.0
        ahead = {number: text.ahead for number, text in texts.items()}
        depth = min(MOST_DEPTH, max(text.most_depth for text in ahead.values()))
        wanted = WantedGuesses(depth, most_guesses, self.acceptance, pace)
        return self._after_foreseen(texts, self._guess_ahead(ahead, wanted, is_trial=is_trial) if depth > 0 else {})

    def _guess_ahead(self, texts: Mapping[int, OpenText], wanted: WantedGuesses, *, is_trial: bool) -> Guesses:
        """Return guesses of what follows `texts`, of which nothing is foreseen."""
        several, able = list[Guesses](), self._able(texts)
        followed = self._cheap(texts, able) if is_trial else able
        looked_up = [number for number, text in texts.items() if self._uses_lookup and text.most_depth > 0]
        if self._draft and followed:
            self._draft.once_s = 0.0  # it may have guessed beside the pass, and has nothing to do now
            several.append(self._drafted(texts, followed, wanted))
            self.once_s += self._draft.once_s
        for number in looked_up:
            is_read, started, text = number in self._looked_up, self._clock(), texts[number]
            lookup = self._lookups.setdefault(number, Lookup())
            found = lookup.draft(text.tokens, replace(wanted, most_depth=min(wanted.most_depth, text.most_depth)))
            self._looked_up.add(number)
            self.once_s += 0.0 if is_read else self._clock() - started
            several.append({(number, *path): guess for path, guess in found.items()})
        return {path: guess for path, guess in merged(several).items() if len(path) - 1 <= texts[path[0]].most_depth}

    def _after_foreseen(self, texts: Mapping[int, OpenText], guesses: Guesses) -> Guesses:
        """Return `guesses` of what follows what is foreseen of `texts`, behind that."""
        if not any(text.foreseen for text in texts.values()):
            return guesses
        sure, found = self.acceptance.chance(FORESEEN, _SURE), dict[Path, Guess]()
        for number, text in texts.items():
            lengths = range(1, 1 + len(text.foreseen))
            found.update({(number, *text.foreseen[:n]): Guess(sure**n, FORESEEN, _SURE) for n in lengths})
        for (number, *path), guess in guesses.items():
            before = texts[number].foreseen
            found[(number, *before, *path)] = replace(guess, value=guess.value * sure ** len(before))
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

    def _drafted(self, texts: Mapping[int, OpenText], followed: Sequence[int], wanted: WantedGuesses) -> Guesses:
        """Return the draft model's guesses for the requests of `followed`."""
        assert self._draft
        if self._overlap and len(texts) == 1:
            (number,) = followed
            found = self._overlap.draft(texts[number].tokens, wanted, texts[number].sequence)
            return {(number, *path): guess for path, guess in found.items()}
        by_sequence = {texts[number].sequence: number for number in followed}
        tokens = {texts[number].sequence: texts[number].tokens for number in followed}
        found = self._draft.draft_many(tokens, wanted)
        return {(by_sequence[path[0]], *path[1:]): guess for path, guess in found.items()}

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
