"""Grammars that are open in a process of their own: what ends it, who waits for room in it, who closes them."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from edge_run import Generation, Model
from edge_run.base.errors import Cancelled
from edge_run.runtime.grammars import room as room_module
from edge_run.runtime.grammars.room import GrammarRoom
from edge_run.runtime.processes import cell
from edge_run.runtime.processes.cell import Cell
from kit_models import KIT

FREE = "root ::= [ -~]*"
LETTERS = "".join(chr(0x4E00 + 2 * number) for number in range(400))
LARGE = f'root ::= "a"* [{LETTERS}]{{2000}} "x"'  # some ten of them leave no room for another one


@pytest.fixture(scope="module")
def facts() -> tuple[int, int]:
    """The size of the vocabulary, and a token that is a letter."""
    with Model(KIT, context_tokens=256, threads=1) as model:
        return model._opened.model.vocabulary, model.tokenize("a", add_special=False)[0]


def test_prompts_wait_for_the_room_that_grammars_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "READING_S", 60.0)  # large ones take their time on a busy machine
    with Model(KIT, context_tokens=2048, threads=1, sequences=24, cache_folder=tmp_path) as model:
        many = model.generate_many(["Once"] * 30, grammar=LARGE, max_tokens=2, temperature=0.0)
        found = dict[int, Any](many)
    assert sorted(found) == list(range(30))
    assert [piece for piece in found.values() if not isinstance(piece.generation, Generation)] == []


def test_ctrl_c_in_the_middle_of_a_job_ends_no_answer(facts: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes to all processes at a terminal; whoever hears it decides what it is for."""
    n_vocab, letter = facts
    with GrammarRoom(KIT) as room:
        grammar = room.open("grammar", FREE, n_vocab)
        grammar.accept(letter)
        exchanged, stops = Cell._exchanged, [True]

        def exchange(self: Cell, *job: Any, **how: Any) -> bytes:
            if stops:
                stops.clear()
                self._end()
                raise Cancelled("stopped by Ctrl-C")
            return exchanged(self, *job, **how)

        monkeypatch.setattr(Cell, "_exchanged", exchange)
        assert grammar.fits(letter)
        assert room._cell.n_started == 2
        assert not stops


def test_a_signal_for_the_whole_service_ends_no_answer(facts: tuple[int, int]) -> None:
    n_vocab, letter = facts
    with GrammarRoom(KIT) as room:
        grammar = room.open("grammar", FREE, n_vocab)
        child = room._cell._child
        assert child is not None
        os.kill(child.process.pid, signal.SIGTERM)
        time.sleep(0.1)
        assert grammar.fits(letter)
        assert room._cell.n_started == 1
    assert child.process.poll() is not None


def test_one_that_the_garbage_collector_closes_in_the_middle_of_a_job(
    facts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    n_vocab, letter = facts
    with GrammarRoom(KIT) as room:
        left, grammar = room.open("grammar", FREE, n_vocab), room.open("grammar", FREE, n_vocab)
        exchange, found = cell._exchange, list[bool]()

        def collect(*request: Any) -> Any:
            monkeypatch.setattr(cell, "_exchange", exchange)
            left.close()
            return exchange(*request)

        monkeypatch.setattr(cell, "_exchange", collect)
        asking = threading.Thread(target=lambda: found.append(grammar.fits(letter)), daemon=True)
        asking.start()
        asking.join(100)
        assert found == [True]
