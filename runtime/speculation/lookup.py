"""Guesses from the text itself: what came after the last few tokens when they were there before.

Prompt look-up (Saxena, 2023), over prompt and answer alike. What followed the last tokens when they were there before
are the guesses: after the longest run of them that was seen first, then after shorter ones, down to a single token. How
far the text has repeated so far says how likely it goes on; a guess that is worth little is verified only where a wider
pass costs little.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from edge_run.runtime.llama.holdings import MOST_LOOKUP_TOKENS
from edge_run.runtime.speculation.drafting import Guess, Guesses, Path, WantedGuesses

LONGEST_RUN = 5
MOST_PLACES = 4  # that are guessed from: after longer runs, and later ones, first
MOST_TAKEN_BACK = 64  # of the last tokens, where others came: as of what was foreseen; else the text is indexed anew
_LONGEST_KIND = 12
_LEAST_ROOM, _SLOTS_OF_A_TOKEN = 512, 8  # powers of two
_MOST_STEPS = 32  # back along the runs of a slot
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # the upper bits of the product hang on all of a run


class Lookup:
    """The drafter. It keeps an index of the conversation's runs of tokens. Not thread-safe."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._runs = _Runs(0, _LEAST_ROOM)

    def draft(self, history: Sequence[int], wanted: WantedGuesses) -> Guesses:
        """Return what followed the runs that end `history`, each path with its beginnings."""
        try:
            self._follow(history)
        except BaseException:  # as Ctrl-C: what is not indexed as a whole cannot be taken back
            self._tokens, self._runs = [], _Runs(0, _LEAST_ROOM)
            raise
        guesses: dict[Path, Guess] = {}
        for end in self._places():
            matched = self._matched(end)
            value = 1.0
            for depth in range(1, min(wanted.most_depth, len(history) - end) + 1):
                kind = ("lookup", min(matched + depth - 1, _LONGEST_KIND), min(depth, 8))
                prior = 1 - 0.6 / (matched + depth)
                value *= wanted.acceptance.chance(kind, prior)
                guesses.setdefault(tuple(self._tokens[end : end + depth]), Guess(value, kind, prior))
        return guesses

    def _places(self) -> list[int]:
        """Return where, before its end, the last tokens of the text were already: after what they are as a run."""
        places: dict[int, None] = {}
        for end in self._runs.places(self._tokens):
            places[end] = None
            if len(places) == MOST_PLACES:
                break
        return list(places)

    def _matched(self, end: int) -> int:
        """Return how many tokens before `end` are those before the end of the text."""
        length, most = 0, min(end, _LONGEST_KIND)
        while length < most and self._tokens[end - 1 - length] == self._tokens[-1 - length]:
            length += 1
        return length

    def _follow(self, history: Sequence[int]) -> None:
        """Index what is new in `history`; a conversation that is another one is indexed anew."""
        known = len(self._tokens)
        if list(history[:known]) != self._tokens:
            known = self._take_back(history)
        self._tokens.extend(history[known:])
        if len(self._tokens) - self._runs.start > self._runs.room:
            known = self._runs.start
            if len(self._tokens) - known > MOST_LOOKUP_TOKENS:
                known = len(self._tokens) - MOST_LOOKUP_TOKENS // 2
            self._runs = _Runs(known, len(self._tokens) - known)
        for end in range(known + 1, len(self._tokens) + 1):
            self._runs.add(self._tokens, end)

    def _take_back(self, history: Sequence[int]) -> int:
        """Take back the last tokens, which `history` does not have, or forget all; return how many stay."""
        common = max(self._runs.start + 1, len(self._tokens) - MOST_TAKEN_BACK)
        if list(history[:common]) != self._tokens[:common]:
            self._tokens, self._runs = [], _Runs(0, _LEAST_ROOM)
            return 0
        while common < len(history) and history[common] == self._tokens[common]:
            common += 1
        while len(self._tokens) > common:
            self._runs.take_back(self._tokens)
            self._tokens.pop()
        return common


class _Runs:
    """Where the runs of a text end, up to LONGEST_RUN tokens long: those that share a slot of a table, last one first.

    It holds numbers of four bytes, as a dictionary of runs would take a kilobyte for each token.

    start: no runs are known that end before. room: so many tokens after it have room.
    """

    def __init__(self, start: int, n_tokens: int) -> None:
        """Have room for `n_tokens`, and up to as many again."""
        self.start, self.room = start, _LEAST_ROOM
        while self.room < n_tokens:
            self.room *= 2
        self._shift = 64 - (_SLOTS_OF_A_TOKEN * self.room).bit_length() + 1
        self._last = array("i", bytes(4 * _SLOTS_OF_A_TOKEN * self.room))  # the number of a slot's last run; 0: of none
        self._before = array("i")  # of each run, the number of the one before it in its slot

    def add(self, tokens: Sequence[int], end: int) -> None:
        """Add the runs that end at `end`, which is next."""
        before, last = self._before, self._last
        for slot in self._slots(tokens, end):
            before.append(last[slot])
            last[slot] = len(before)
        if end < LONGEST_RUN:
            before.extend([0] * (LONGEST_RUN - end))

    def take_back(self, tokens: Sequence[int]) -> None:
        """Take back the runs that end `tokens`, which were added last."""
        slots = self._slots(tokens, len(tokens))
        numbers = self._before[-LONGEST_RUN:]
        for slot, number in reversed(list(zip(slots, numbers, strict=False))):  # several may share a slot
            self._last[slot] = number
        del self._before[-LONGEST_RUN:]

    def places(self, tokens: Sequence[int]) -> Iterator[int]:
        """Return where runs that end `tokens` were before: long ones first, then late ones, some steps back."""
        slots = self._slots(tokens, len(tokens))
        for length in range(len(slots), 0, -1):
            run, number = tokens[-length:], self._last[slots[length - 1]]
            for _ in range(_MOST_STEPS):
                if not number:
                    break
                before, known = divmod(number - 1, LONGEST_RUN)
                end = self.start + 1 + before
                if known == length - 1 and end < len(tokens) and tokens[end - length : end] == run:
                    yield end
                number = self._before[number - 1]

    def _slots(self, tokens: Sequence[int], end: int) -> list[int]:
        """Return the slots of the runs that end at `end`, the shortest one first."""
        slots, found = list[int](), 0
        for token in reversed(tokens[max(0, end - LONGEST_RUN) : end]):
            found = (found + token + 1) * _MULTIPLIER & _MASK
            slots.append(found >> self._shift)
        return slots
