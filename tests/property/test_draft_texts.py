"""The texts that a draft model follows, in cells that all share: rows are their texts', no cell is beyond the room.

A token takes the lowest free cell, as in llama.cpp.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cells import VOCABULARY, row_of
from edge_run.base.protocols import BatchToken, Capabilities, Logits
from edge_run.runtime.speculation import draft_trees
from edge_run.runtime.speculation.draft_texts import DraftTexts
from edge_run.runtime.speculation.draft_trees import DraftTrees
from edge_run.runtime.speculation.drafting import Acceptance, WantedGuesses

N_TEXTS, BEAM, CELLS = 3, 4, 120
BRANCHES = range(N_TEXTS, N_TEXTS + BEAM)


class LowestCells:
    """A decoder that gives tokens the lowest free cells. used: by cell, the position, the token and its sequences."""

    def __init__(self, can_branch: bool) -> None:
        self.capabilities = Capabilities(CELLS, 512, N_TEXTS + BEAM, VOCABULARY, True, can_branch, 64)
        self.used: dict[int, tuple[int, int, set[int]]] = {}
        self.highest = 0

    def decode(self, batch: Sequence[BatchToken]) -> Logits:
        rows = []
        for token in batch:
            cell = next(cell for cell in range(CELLS) if cell not in self.used)
            self.highest = max(self.highest, cell + 1)
            self.used[cell] = token.position, token.token, {token.sequence}
            text = self.text(token.sequence)
            assert len(text) == token.position + 1
            if token.wants_logits:
                rows.append(row_of(text))
        return np.array(rows)

    def text(self, sequence: int) -> list[int]:
        held = sorted((position, token) for position, token, members in self.used.values() if sequence in members)
        assert [position for position, _ in held] == list(range(len(held)))
        return [token for _, token in held]

    def rewind(self, sequence: int, position: int) -> int:
        for place, _, members in self.used.values():
            if place >= position:
                members.discard(sequence)
        self.used = {cell: held for cell, held in self.used.items() if held[2]}
        return min(position, len(self.text(sequence)))

    def branch(self, sequence: int, branches: Sequence[int]) -> None:
        assert self.capabilities.can_branch
        for branch in branches:
            self.rewind(branch, 0)
            for _, _, members in self.used.values():
                if sequence in members:
                    members.add(branch)

    def keep(self, sequence: int, position: int, branch: int, branches: Sequence[int]) -> None:
        for other in branches:
            self.rewind(other, 0)


@given(st.integers(0, 2**32), st.booleans())
def test_texts_come_go_on_and_turn_off(seed: int, can_branch: bool) -> None:
    chance = random.Random(seed)
    decoder = LowestCells(can_branch)
    branches = BRANCHES if can_branch else ()
    texts, trees = DraftTexts(decoder, N_TEXTS, CELLS), DraftTrees(decoder, branches, BEAM, VOCABULARY)
    told: dict[int, list[int]] = {}
    begin = [chance.randrange(VOCABULARY) for _ in range(40)]
    for _ in range(12):
        for number in chance.sample(range(N_TEXTS), chance.randint(1, N_TEXTS)):
            before = told.get(number, [])
            kept = before if chance.random() < 0.7 else begin[: chance.randrange(40)]
            more = [chance.randrange(VOCABULARY) for _ in range(chance.choice([1, 3, 30]))]
            told[number] = [*kept, *more][:100]
        asked = {number: told[number] for number in chance.sample(sorted(told), chance.randint(1, len(told)))}
        depth = chance.randint(1, 4)
        decoder.keep(0, 0, 0, branches)
        room = texts.follow(asked, (depth - 1) * (BEAM if can_branch else len(asked)))
        assert max(decoder.used, default=-1) < room.kept_cells or not decoder.used
        assert room.kept_cells <= room.most_cells <= CELLS
        decoder.highest = 0
        if not room.texts:
            continue
        chosen = {number: asked[number] for number in room.texts}
        rows = texts.read(chosen)
        assert np.array_equal(rows, np.array([row_of(text) for text in chosen.values()]))
        lengths = {number: len(text) for number, text in chosen.items()}
        with mock.patch.object(draft_trees, "CHOICES", 3):
            guesses = trees.grow(lengths, rows, CELLS - texts.n_held, WantedGuesses(depth, 8, Acceptance()))
        assert guesses.keys() == chosen.keys()
        assert all(1 <= max(map(len, own)) <= depth for own in guesses.values())
        assert decoder.highest <= room.most_cells
        for number, text in chosen.items():
            assert texts.n_unread(number, text) == 1
            assert decoder.text(number)[: len(text)] == text


def test_a_beginning_that_another_text_has_is_not_read_again() -> None:
    decoder = LowestCells(can_branch=True)
    texts = DraftTexts(decoder, N_TEXTS, CELLS)
    begin = [0, 1, 2, 3, 4] * 9
    texts.follow({0: begin}, 0)
    texts.read({0: begin})
    texts.follow({0: [*begin, 1], 1: [*begin, 2, 3]}, 0)
    assert texts.n_unread(1, [*begin, 2, 3]) == 2
    texts.read({0: [*begin, 1], 1: [*begin, 2, 3]})
    assert len(decoder.used) == len(begin) + 3


def test_what_was_read_for_others_is_read_again() -> None:
    """Else the time to the second token would tell what they asked."""
    decoder = LowestCells(can_branch=True)
    texts, text = DraftTexts(decoder, N_TEXTS, CELLS), [0, 1, 2, 3, 4] * 5
    for number, salt, n_unread in ((0, "a", 25), (1, "b", 25), (2, "a", 1), (0, "a", 1), (0, "b", 1), (2, "c", 25)):
        texts.belong(number, salt)
        texts.follow({number: text}, 0)
        assert texts.n_unread(number, text) == n_unread, (number, salt)
        assert np.array_equal(texts.read({number: text}), [row_of(text)])


def test_where_not_all_have_room_those_that_need_least_are_followed() -> None:
    decoder = LowestCells(can_branch=True)
    texts = DraftTexts(decoder, N_TEXTS, 60)
    texts.follow({2: [1] * 30}, 0)
    texts.read({2: [1] * 30})
    room = texts.follow({0: [2] * 50, 1: [3] * 20}, 0)  # the text that nobody asks for gives way
    assert room.texts == (1,)
    assert decoder.text(2) == []
