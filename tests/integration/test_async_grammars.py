"""Grammars of an `AsyncModel`: one that takes long to open holds nobody up, and none is left behind."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from edge_run import AsyncModel, ConfigError
from edge_run.runtime.grammars.room import GrammarRoom, RoomedGrammar

PROMPT = "Once upon a time"
pytestmark = pytest.mark.anyio


class SlowOpening:
    """Grammars are opened when `may_open` is set. opening: whether one waits for that. closed: grammars that were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opening, self.may_open, self.closed = threading.Event(), threading.Event(), set[int]()
        self.opened = list[RoomedGrammar]()
        really_open, really_close = GrammarRoom.open, RoomedGrammar.close

        def open_slowly(room: GrammarRoom, name: str, text: str, n_vocab: int) -> RoomedGrammar:
            self.opening.set()
            assert self.may_open.wait(60)
            self.opened.append(really_open(room, name, text, n_vocab))
            return self.opened[-1]

        def close(grammar: RoomedGrammar) -> None:
            self.closed.add(id(grammar))
            really_close(grammar)

        monkeypatch.setattr(GrammarRoom, "open", open_slowly)
        monkeypatch.setattr(RoomedGrammar, "close", close)


GRAMMAR: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "grammar": 'root ::= ("a " | "b ")+'}


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_grammar_that_takes_long_to_open_holds_nobody_up(
    kit: Path, is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer begins and ends meanwhile. Whoever waited and is gone leaves no grammar behind."""
    slow, said = SlowOpening(monkeypatch), list[str]()
    async with AsyncModel(kit, context_tokens=512, threads=1, sequences=2) as model:

        async def answer(scope: anyio.CancelScope) -> None:
            with scope:
                said.extend([piece.text async for piece in model.generate(PROMPT, **GRAMMAR)])

        async with anyio.create_task_group() as group:
            scope = anyio.CancelScope()
            group.start_soon(answer, scope)
            await anyio.to_thread.run_sync(slow.opening.wait)
            plain = [piece async for piece in model.generate(PROMPT, max_tokens=8, temperature=0)]
            assert plain[-1].generation is not None
            assert not said
            if is_cancelled:
                scope.cancel()
            slow.may_open.set()
        assert bool(said) != is_cancelled
        assert set("".join(said)) <= set("ab ")
        assert slow.closed == set(map(id, slow.opened))
        with pytest.raises(ConfigError):
            [piece async for piece in model.generate(PROMPT, max_tokens=4, grammar="root ::= (")]
        assert [p.text async for p in model.generate(PROMPT, max_tokens=8, temperature=0)] == [p.text for p in plain]


async def test_a_task_that_asyncio_cancels_leaves_no_grammar_behind(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that waits for its turn to open one, which never comes."""
    slow = SlowOpening(monkeypatch)
    async with AsyncModel(kit, context_tokens=512, threads=1, sequences=4) as model:

        async def answer() -> None:
            async for _ in model.generate(PROMPT, **GRAMMAR):
                pass

        tasks = [asyncio.create_task(answer()) for _ in range(3)]
        await anyio.to_thread.run_sync(slow.opening.wait)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        slow.may_open.set()
        assert "".join([p.text async for p in model.generate(PROMPT, **GRAMMAR)])
        with anyio.fail_after(60):  # the thread of the first goes on without its task, and closes what it opens
            while len(slow.closed) < 2:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert len(slow.opened) == 2, "the first, and the last"
        assert slow.closed == set(map(id, slow.opened))
