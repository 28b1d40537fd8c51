"""The texts that a draft model follows: each in a sequence of its own, in cells that all share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge_run.base.protocols import BatchToken, Decoder, Logits
from edge_run.runtime.decoding.common_prefix import common_prefix_tokens

WORTH_SHARING_TOKENS = 16  # of a beginning that another text has


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """What the texts need of the cells.

    texts: the numbers of those that have room.
    kept_cells: up to this one something is written.
    most_cells: up to this one something may be written, until room is asked for again.
    """

    texts: tuple[int, ...]
    kept_cells: int
    most_cells: int


class DraftTexts:
    """The texts in the first `n_texts` sequences of a decoder, and nothing else's. Not thread-safe.

    most_cells: that texts and guesses may take together.
    n_read: the tokens that were read last.

    Cells that several texts share count for each of them. A token takes the lowest free cell, so that a single text
    lies in the first cells; where there were several, cells are kept up to the highest that may be written, until none
    is left.
    """

    def __init__(self, decoder: Decoder, n_texts: int, most_cells: int) -> None:
        self._decoder, self.most_cells = decoder, most_cells
        self._held: list[list[int]] = [[] for _ in range(n_texts)]
        self._salts = [""] * n_texts  # whom the tokens may serve
        self._was_several, self._top, self.n_read = False, 0, 0

    @property
    def n_held(self) -> int:
        """The tokens of all texts."""
        return sum(map(len, self._held))

    def belong(self, number: int, salt: str) -> None:
        """Have sequence `number` serve texts of `salt` from now on; what it holds for others is forgotten."""
        if self._salts[number] != salt:
            self._cut(number, 0)
            self._salts[number] = salt

    def n_unread(self, number: int, text: Sequence[int]) -> int:
        """Return how many tokens of `text` sequence `number` does not hold."""
        return len(text) - common_prefix_tokens(self._held[number], text)

    def follow(self, texts: Mapping[int, Sequence[int]], n_guesses: int) -> DraftRoom:
        """Keep what sequences hold of `texts`, which go by the numbers of sequences; return who has room for the rest.

        n_guesses: tokens that may be beside the texts, as far as there is room. Texts that are not asked for stay as
        long as others need no room.
        """
        for number, held in enumerate(self._held):
            if held:
                self._cut(number, len(held))
        for number, text in texts.items():
            self._keep_beginning(number, text)
        chosen = self._choose(texts)
        if len(chosen) < len(texts):
            for number in range(len(self._held)):
                if number not in texts:
                    self._cut(number, 0)
            chosen = self._choose(texts)
        if not self.n_held:
            self._was_several = False
        kept = self._top if self._was_several else min(self.n_held, self.most_cells)  # shared cells count twice
        n_new = sum(len(texts[number]) - len(self._held[number]) for number in chosen)
        self._was_several |= sum(bool(held) or number in chosen for number, held in enumerate(self._held)) > 1
        self._top = max(kept, min(self.n_held + n_new + n_guesses, self.most_cells))
        return DraftRoom(tuple(chosen), kept, self._top)

    def read(self, texts: Mapping[int, Sequence[int]]) -> Logits:
        """Have sequences hold `texts`, which have room; return the logits after each, `(n_texts, vocabulary)`."""
        starts = {number: len(self._held[number]) for number in texts}
        batch = [
            BatchToken(text[position], position, number, wants_logits=position + 1 == len(text))
            for number, text in texts.items()
            for position in range(starts[number], len(text))
        ]
        self.n_read = len(batch)
        try:
            rows = self._decoder.decode(batch)
        except BaseException:
            for number, start in starts.items():
                self._cut(number, start)
            raise
        for number, text in texts.items():
            self._held[number] += text[starts[number] :]
        return rows

    def _keep_beginning(self, number: int, text: Sequence[int]) -> None:
        """Have sequence `number` hold as much of `text` as is there, its last token excepted."""
        common = common_prefix_tokens(self._held[number], text)
        if self._decoder.capabilities.can_branch and len(text) - common > WORTH_SHARING_TOKENS:
            salts = [salt == self._salts[number] for salt in self._salts]
            alike = [common_prefix_tokens(held, text) * is_own for held, is_own in zip(self._held, salts, strict=True)]
            source = max(range(len(alike)), key=alike.__getitem__)
            if alike[source] > common + WORTH_SHARING_TOKENS:
                self._decoder.branch(source, (number,))
                self._held[number], common = list(self._held[source]), alike[source]
        self._cut(number, common)

    def _choose(self, texts: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the numbers of those that have room, with one cell to spare: those first that need the least."""
        left, chosen = self.most_cells - self.n_held - 1, []
        for number in sorted(texts, key=lambda number: len(texts[number]) - len(self._held[number])):
            left -= len(texts[number]) - len(self._held[number])
            if left < 0:
                break
            chosen.append(number)
        return chosen

    def _cut(self, number: int, n_tokens: int) -> None:
        """Cut a text, and what was guessed in its sequence."""
        del self._held[number][self._decoder.rewind(number, n_tokens) :]
