"""GrammarRoom: how much of a model's time the grammar of an answer may take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from edge_run.base.errors import BudgetError, Cancelled, NotSupported
from edge_run.runtime.grammars import room as rooms
from edge_run.runtime.grammars.room import MOST_PLAIN_STEPS, MOST_S, GrammarRoom, RoomedGrammar
from edge_run.runtime.grammars.schema_grammar import JSON_SCHEMA
from edge_run.runtime.processes.cell import LostProcess

PLAIN_STEP_S = 0.01


class Cell:
    """A process in which every job of a grammar takes as long as the number says that it was opened with."""

    def __init__(self, module: str) -> None:
        self.n_started, self.is_alive = 1, True
        self.step_s: dict[int, float] = {}
        self.before: Callable[[str], None] = lambda job: None

    def ask(self, job: str, limit_s: float = 0, *, is_first: bool = True, **fields: Any) -> bytes:
        return self.timed(job, is_first=is_first, **fields)[0]

    def timed(self, job: str, *, is_first: bool = True, **fields: Any) -> tuple[bytes, float]:
        self.before(job)
        if job in ("load", "convert"):
            return str(fields.get("schema", "")).encode(), 0.0
        if job == "load_vocabulary":
            self.n_started += not self.is_alive
            self.is_alive = True
            return str(PLAIN_STEP_S).encode(), 0.0
        if not self.is_alive:
            raise LostProcess("has lost its process")
        if job == "open_grammar":
            self.step_s[fields["number"]] = float(fields["text"])
            return b"", 0.0
        return b"\1", self.step_s[fields["number"]]

    def end(self) -> None:
        self.is_alive = False
        self.step_s.clear()

    close = end


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> GrammarRoom:
    cell = Cell("")
    monkeypatch.setattr(rooms, "Cell", lambda module: cell)
    return GrammarRoom(Path("model.gguf"))


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


@pytest.mark.parametrize("job", ["refused", "fits", "accept", "open_grammar"])
def test_a_grammar_whose_process_another_ends_while_it_waits_is_opened_anew(room: GrammarRoom, job: str) -> None:
    """Its answer goes on: the other one took too much, and not this one."""
    cell, ends = cast("Any", room)._cell, [3]

    def end(asked: str) -> None:
        if asked == job and ends[0]:
            ends[0] -= 1
            cell.end()

    grammar = room.open("grammar", str(PLAIN_STEP_S), 8)
    cell.before = end
    if job == "open_grammar":
        cell.end()
    go_on(grammar, 10)
    assert ends == [0]


@pytest.mark.parametrize(("most_letters", "n_conversions"), [(40, 3), (20, 5)])
def test_schemas_that_wait_for_room_in_turn_are_converted_once(
    room: GrammarRoom, monkeypatch: pytest.MonkeyPatch, most_letters: int, n_conversions: int
) -> None:
    """Each was converted at each try, by the schema that was converted last being another one."""
    monkeypatch.setattr(rooms, "MOST_CONVERTED_LETTERS", most_letters)
    first, second, last = "1", "1.0", "1.000000000000"
    jobs = list[str]()

    def refuse(job: str) -> None:
        jobs.append(job)
        if job == "open_grammar":
            raise BudgetError("there is no room")

    cast("Any", room)._cell.before = refuse
    for schema in (first, second, first, second, last, first, second):
        with pytest.raises(BudgetError):
            room.open(JSON_SCHEMA, schema, 8)
    assert jobs.count("convert") == n_conversions
    assert jobs.count("open_grammar") == 7


def test_a_grammar_is_not_opened_for_ever_in_a_room_that_is_closed(room: GrammarRoom) -> None:
    cell = cast("Any", room)._cell

    def close(asked: str) -> None:
        if asked == "open_grammar":
            room.close()

    cell.before = close
    with pytest.raises(Cancelled, match="closed"):
        room.open("grammar", "1", 8)
    assert not cell.is_alive
