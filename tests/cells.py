"""A decoder without a model, over a cache of cells as llama.cpp has one: its logits hang on the text alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import numpy as np

from edge_run.base.errors import TierReadError
from edge_run.base.protocols import BatchToken, Capabilities, Logits

VOCABULARY, CONTEXT = 5, 40


def row_of(text: Sequence[int]) -> Logits:
    """Return logits that only this text has; nobody may change them."""
    return _row_of(tuple(text))


@functools.lru_cache(4096)  # each is asked for when it is computed, and when it is compared
def _row_of(text: tuple[int, ...]) -> Logits:
    row = np.random.default_rng([7, *text]).standard_normal(VOCABULARY).astype(np.float32)
    row.flags.writeable = False
    return row


class Cells:
    """A decoder that keeps tokens by position and sequence, and says what each token sees before it."""

    def __init__(self, can_branch: bool, failing: random.Random | None = None, n_cells: int = CONTEXT) -> None:
        self.capabilities = Capabilities(n_cells, 12, 6, VOCABULARY, True, can_branch, 12)
        self.cells: list[tuple[int, int, set[int]]] = []
        self._failing = failing
        self.is_in_order = True

    def decode(self, batch: Sequence[BatchToken]) -> Logits:
        assert len(self.cells) + len(batch) <= self.capabilities.context_tokens, "more cells than there are"
        rows = []
        fails = self._failing is not None and self._failing.random() < 0.2
        for token in batch:
            members = {token.sequence, *token.branches}
            self.cells.append((token.position, token.token, members))
            if token.wants_logits:
                first = min(members)
                text = self.text(first)
                rows.append(row_of(text))
                for member in members - {first}:
                    assert self.text(member)[: token.position + 1] == text[: token.position + 1]
        if fails:
            for sequence in {token.sequence for token in batch}:
                self.rewind(sequence, min(token.position for token in batch if token.sequence == sequence))
            for branch in {branch for token in batch for branch in token.branches}:
                self._drop(branch, 0)
            raise TierReadError("the drive is gone")
        return np.array(rows)

    def text(self, sequence: int) -> list[int]:
        """Return what `sequence` holds; each position once, without gaps."""
        held = sorted((position, token) for position, token, members in self.cells if sequence in members)
        assert [position for position, _ in held] == list(range(len(held)))
        return [token for _, token in held]

    def rewind(self, sequence: int, position: int) -> int:
        self._drop(sequence, position)
        return min(position, len(self.text(sequence)))

    def branch(self, sequence: int, branches: Sequence[int]) -> None:
        for branch in branches:
            self._drop(branch, 0)
            for _, _, members in self.cells:
                if sequence in members:
                    members.add(branch)

    def keep(self, sequence: int, position: int, branch: int, branches: Sequence[int]) -> None:
        if branch != sequence:
            self._drop(sequence, position)
            for place, _, members in self.cells:
                if branch in members and place >= position:
                    members.add(sequence)
        for other in branches:
            self._drop(other, 0)

    def _drop(self, sequence: int, position: int) -> None:
        for place, _, members in self.cells:
            if place >= position:
                members.discard(sequence)
        self.cells = [cell for cell in self.cells if cell[2]]
