"""GrammarRoom: how much of a model's time the grammar of an answer may take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_run.base.errors import NotSupported
from edge_run.runtime.grammars import room as rooms
from edge_run.runtime.grammars.room import MOST_PLAIN_STEPS, MOST_S, GrammarRoom, RoomedGrammar

PLAIN_STEP_S = 0.01


class Cell:
    """A process in which every job of a grammar takes as long as the number says that it was opened with."""

    def __init__(self, module: str) -> None:
        self.now_s, self.n_started, self.is_alive = 0.0, 1, True
        self.step_s: dict[int, float] = {}

    def ask(self, job: str, limit_s: float = 0, *, is_first: bool = True, **fields: Any) -> bytes:
        if job == "load_vocabulary":
            return str(PLAIN_STEP_S).encode()
        if job == "open_grammar":
            self.step_s[fields["number"]] = float(fields["text"])
            return b""
        self.now_s += self.step_s[fields["number"]]
        return b"\1"

    def close(self) -> None:
        self.is_alive = False


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> GrammarRoom:
    cell = Cell("")
    monkeypatch.setattr(rooms, "Cell", lambda module: cell)
    return GrammarRoom(Path("model.gguf"), lambda: cell.now_s)


def go_on(grammar: RoomedGrammar, n_tokens: int) -> None:
    for token in range(n_tokens):
        grammar.refused()
        assert grammar.fits(token)
        grammar.accept(token)


def test_an_answer_whose_grammar_is_slow_ends_and_others_go_on(room: GrammarRoom) -> None:
    slow, plain = room.open("grammar", "1", 8), room.open("JSON schema", str(PLAIN_STEP_S), 8)
    go_on(plain, 10)
    with pytest.raises(NotSupported, match=r"^grammar: has taken 12\.0 s for 4 tokens of .*simplify it$"):
        go_on(slow, 10)
    with pytest.raises(NotSupported):
        slow.fits(1)
    go_on(plain, 10_000)


def test_a_grammar_that_takes_long_for_some_tokens_may(room: GrammarRoom) -> None:
    go_on(room.open("grammar", str(MOST_S / 30), 8), 10)
    go_on(room.open("grammar", str(MOST_PLAIN_STEPS / 3 * PLAIN_STEP_S), 8), 10_000)
