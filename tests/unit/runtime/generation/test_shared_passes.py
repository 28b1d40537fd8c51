"""Tasks that share passes: each has its pieces, whoever leaves, and a pass wakes no more of them than it must."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_run.base.errors import BudgetError, Cancelled, ConfigError
from edge_run.base.results import Piece
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.generation import shared_passes
from edge_run.runtime.generation.batched_answers import Event
from edge_run.runtime.generation.request import Request, Turn
from edge_run.runtime.generation.shared_passes import SharedPasses
from edge_run.runtime.processes.model_thread import ModelThread


class Passes:
    """A model of which each pass brings the oldest two requests a piece; after so many pieces a request has ended."""

    is_closed = False

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.n_passes = self.n_requests = 0

    @property
    def is_idle(self) -> bool:
        return not self.left

    def open_batch(self) -> Any:
        return self

    def sampling_of(self, request: Request) -> SamplingConfig:
        return request.sampling

    def begin(self, request: Request) -> Any:
        return request.max_tokens

    def submit(self, answer: int, turn: Any) -> int:
        self.n_requests += 1
        self.left[self.n_requests] = answer
        return self.n_requests

    def advance(self) -> list[Event]:
        self.n_passes += 1
        events = []
        for number in sorted(self.left)[:2]:
            self.left[number] -= 1
            is_last = not self.left[number]
            generation: Any = SimpleNamespace() if is_last else None
            events.append(Event(number, Piece(f"{self.left[number]}", (), generation)))
            if is_last:
                del self.left[number]
        return events

    def cancel(self, number: int) -> None:
        pass

    def drop(self, number: int) -> None:
        self.left.pop(number, None)


async def read(passes: SharedPasses, n_pieces: int, leaves_after: int | None, found: Counter[str]) -> None:
    async with aclosing(passes.stream(Request([1], max_tokens=n_pieces))) as pieces:
        async for _ in pieces:
            found["pieces"] += 1
            if leaves_after is not None and (leaves_after := leaves_after - 1) <= 0:
                return
    found["finished"] += 1


@given(st.lists(st.tuples(st.integers(1, 6), st.none() | st.integers(1, 7)), min_size=1, max_size=12))
def test_everybody_has_all_pieces_whoever_leaves(asked: list[tuple[int, int | None]]) -> None:
    async def main() -> Counter[str]:
        model, found = Passes(), Counter[str]()
        passes = SharedPasses(model, ModelThread())  # type: ignore[arg-type]
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for n_pieces, leaves_after in asked:
                    group.start_soon(read, passes, n_pieces, leaves_after, found)
        assert not model.left
        return found

    found = anyio.run(main)
    assert found["pieces"] == sum(min(n, n if leaves is None else leaves) for n, leaves in asked)


def test_tasks_that_are_cancelled_while_they_wait_leave_the_turn_to_others() -> None:
    async def main() -> None:
        model, found = Passes(), Counter[str]()
        passes = SharedPasses(model, ModelThread())  # type: ignore[arg-type]
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group, anyio.create_task_group() as leaving:
                for _ in range(3):
                    leaving.start_soon(read, passes, 10**9, None, found)
                for _ in range(3):
                    group.start_soon(read, passes, 4, None, found)
                while found["pieces"] < 20:  # noqa: ASYNC110 - what it waits for sets no event
                    await anyio.sleep(0.001)
                leaving.cancel_scope.cancel()
        assert found["finished"] == 3

    anyio.run(main)


def test_an_error_of_a_pass_reaches_all_whatever_else_fails() -> None:
    class Failing(Passes):
        def advance(self) -> list[Event]:
            self.n_passes += 1
            raise ConfigError("this model was closed")

        def drop_all(self) -> None:
            raise ConfigError("this model was closed")

    async def main() -> int:
        model, n_told = Failing(), 0
        passes = SharedPasses(model, ModelThread())  # type: ignore[arg-type]

        async def ask() -> None:
            nonlocal n_told
            with pytest.raises(ConfigError, match="closed"):
                await read(passes, 3, None, Counter())
            n_told += 1

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(ask)
        assert model.n_passes == 1, "of those that the error has reached, none computes"
        return n_told

    assert anyio.run(main) == 3


def test_a_grammar_whose_answer_is_over_by_its_turn_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_passes, "GRAMMARS_AHEAD", 0)
    opened, deadlines = list[SamplingConfig](), list[float]()

    class Grammared(Passes):
        most_parallel = 1

        def open_grammar(self, sampling: SamplingConfig) -> Any:
            opened.append(sampling)
            return SimpleNamespace(close=lambda: None)

        def begin(self, request: Request, *grammars: Any) -> Any:
            return request.max_tokens

        def submit(self, answer: int, turn: Any) -> int:
            deadlines.extend([turn.deadline_s] if turn.deadline_s else [])
            return super().submit(answer, turn)

    async def main() -> None:
        passes = SharedPasses(Grammared(), ModelThread())  # type: ignore[arg-type]
        sampling = SamplingConfig(grammar='root ::= "a"')
        held = passes.stream(Request([1], 10**9, sampling))
        await anext(held)
        late = passes.stream(Request([1], 1, sampling, turn=Turn(deadline_s=0.05)))
        with anyio.fail_after(60):
            assert [piece async for piece in late]
        await held.aclose()
        assert len(opened) == 1
        assert deadlines[0] < 1e-300

    anyio.run(main)


def test_a_deadline_counts_from_the_asking() -> None:
    """It counted from the end of the pass at hand, which may take longer than an answer may."""
    deadlines, is_computing, may_end = list[float](), threading.Event(), threading.Event()

    class Slow(Passes):
        def submit(self, answer: int, turn: Any) -> int:
            deadlines.extend([turn.deadline_s] if turn.deadline_s else [])
            return super().submit(answer, turn)

        def advance(self) -> list[Event]:
            is_computing.set()
            assert may_end.wait(60)
            return super().advance()

    async def ask(passes: SharedPasses, is_asked: anyio.Event) -> None:
        is_asked.set()
        assert [piece async for piece in passes.stream(Request([1], 1, turn=Turn(deadline_s=0.1)))]

    async def main() -> None:
        passes, found = SharedPasses(Slow(), ModelThread()), Counter[str]()  # type: ignore[arg-type]
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(read, passes, 2, None, found)
                await anyio.to_thread.run_sync(is_computing.wait, 60)
                is_asked = anyio.Event()
                group.start_soon(ask, passes, is_asked)
                await is_asked.wait()
                await anyio.sleep(0.2)  # twice as long as the answer may take, of the pass at hand alone
                may_end.set()

    anyio.run(main)
    assert len(deadlines) == 1
    assert deadlines[0] < 1e-300


def test_an_answer_whose_time_is_over_before_there_is_room_for_its_grammar_ends_without_one() -> None:
    """It failed for the lack of room. What its grammar is made of is written once, however often there is none."""
    grammars, written = list[str | None](), list[Request]()

    class Full(Passes):
        most_parallel = 2

        def sampling_of(self, request: Request) -> SamplingConfig:
            written.append(request)
            return super().sampling_of(request)

        def open_grammar(self, sampling: SamplingConfig) -> Any:
            raise BudgetError("there is no room")

        def begin(self, request: Request, *opened: Any) -> Any:
            assert not opened
            grammars.append(request.sampling.grammar)
            return super().begin(request)

    async def main() -> None:
        passes = SharedPasses(Full(), ModelThread())  # type: ignore[arg-type]
        with anyio.fail_after(60):
            assert [piece async for piece in passes.stream(request)]

    request = Request([1], 1, SamplingConfig(grammar="root ::= x"), Turn(deadline_s=0.05))
    anyio.run(main)
    assert grammars == [None]
    assert len(written) <= 1  # none where that took longer


@pytest.mark.parametrize("most_fitting", [3, 99])
def test_no_more_grammars_are_open_than_answers_that_run_or_are_next(most_fitting: int) -> None:
    """And none of a key is opened while another key, which has fewer, waits for one. None fails where fewer fit."""

    class Grammared(Passes):
        most_parallel = 2

        def __init__(self) -> None:
            super().__init__()
            self.grammars, self.most, self.keys = set[int](), 0, list[str]()

        def open_grammar(self, sampling: SamplingConfig) -> Any:
            if len(self.grammars) >= most_fitting:
                raise BudgetError("there is no room")
            grammar = SimpleNamespace(close=lambda: self.grammars.discard(id(grammar)))
            self.grammars.add(id(grammar))
            self.most = max(self.most, len(self.grammars))
            return grammar

        def begin(self, request: Request, *grammars: Any) -> Any:
            self.keys.append(request.turn.key)
            self.closing[self.n_requests + 1] = grammars[0].close
            return super().begin(request)

        def advance(self) -> list[Event]:
            events = super().advance()
            for event in events:
                if event.is_last:
                    self.closing[event.request]()
            return events

        closing: ClassVar[dict[int, Any]] = {}

    async def answer(passes: SharedPasses, key: str, deadline_s: float | None = None) -> None:
        request = Request([1], 3, SamplingConfig(grammar="root ::= x"), Turn(key=key, deadline_s=deadline_s))
        async with aclosing(passes.stream(request)) as pieces:
            async for _ in pieces:
                pass

    async def main() -> None:
        passes = SharedPasses(model, ModelThread())  # type: ignore[arg-type]
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for key in ("many",) * 20 + ("few",) * 2:
                    group.start_soon(answer, passes, key)

    model = Grammared()
    anyio.run(main)
    assert model.most == min(model.most_parallel + shared_passes.GRAMMARS_AHEAD, most_fitting)
    assert len(model.keys) == 22
    assert model.keys.index("few") < 8
    assert not model.grammars


def test_a_pass_wakes_those_that_it_brought_something_and_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    woken = 0
    wake = shared_passes._Inbox.wake

    def counted(inbox: Any) -> None:
        nonlocal woken
        woken += 1
        wake(inbox)

    monkeypatch.setattr(shared_passes._Inbox, "wake", counted)

    async def main() -> int:
        model, found = Passes(), Counter[str]()
        passes = SharedPasses(model, ModelThread())  # type: ignore[arg-type]
        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(read, passes, 3, None, found)
        assert found["finished"] == 50
        return model.n_passes

    n_passes = anyio.run(main)
    assert woken <= 4 * n_passes


def test_tasks_may_come_and_leave_while_a_pass_ends() -> None:
    async def main() -> Counter[str]:
        model, found = Passes(), Counter[str]()
        passes = SharedPasses(model, ModelThread())  # type: ignore[arg-type]
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for number in range(1500):
                    group.start_soon(read, passes, 1 + number % 7, None if number % 3 else 2, found)
                    if not number % 2:
                        await anyio.lowlevel.checkpoint()
        assert not model.left
        return found

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that what happens once in thousands of passes happens here
    try:
        found = anyio.run(main)
    finally:
        sys.setswitchinterval(interval_s)
    assert found["finished"] >= 1000


@pytest.mark.parametrize("n_cancels", [1, 3])
def test_who_is_cancelled_by_asyncio_itself_while_a_request_is_taken_on_leaves_none_behind(n_cancels: int) -> None:
    class Slow(Passes):
        def begin(self, request: Request) -> Any:
            has_begun.set()
            assert may_end.wait(60)
            return super().begin(request)

    async def main() -> None:
        passes, found = SharedPasses(model, thread), Counter[str]()  # type: ignore[arg-type]
        task = asyncio.ensure_future(read(passes, 5, None, found))
        await asyncio.to_thread(has_begun.wait)
        for _ in range(n_cancels):
            task.cancel()
            await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await thread.run(lambda: None)

    has_begun, may_end = threading.Event(), threading.Event()
    model, thread = Slow(), ModelThread()
    asyncio.run(main())
    assert not model.left


def test_an_answer_whose_request_was_forgotten_is_cancelled() -> None:
    async def main() -> None:
        model = Passes()
        passes = SharedPasses(model, ModelThread())  # type: ignore[arg-type]
        with anyio.fail_after(60):
            async with aclosing(passes.stream(Request([1], max_tokens=9))) as pieces:
                await anext(pieces)
                model.left.clear()  # as the closing of the model does
                with pytest.raises(Cancelled):
                    await anext(pieces)

    anyio.run(main)
