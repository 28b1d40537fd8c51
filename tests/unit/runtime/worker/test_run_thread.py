"""The thread of a worker: while it has no run, what comes is nobody's; of a run, no message is missed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.errors import DeviceLost, MeshError
from edge_run.base.mesh import Message
from edge_run.runtime.worker import run_thread
from edge_run.runtime.worker.run_thread import RunThread
from fake_mesh import FakeMesh, Hub
from waiting import until

STEPS = 60


class Run:
    """Stands for a `WorkerRun`, and for its transport and engine: notes the messages that come to it."""

    coordinator, model, epoch, is_over = "a", "some.gguf", 1, False

    def __init__(self, link: FakeMesh) -> None:
        self.transport = self.engine = self.interrupt = self
        self._link = link
        self.found: list[object] = []

    def command(self, timeout_s: float) -> None:
        message = self._link.receive(timeout_s=timeout_s)
        if message is not None:
            self.found.append(message.header["number"])

    def end(self) -> None: ...

    def cancel(self) -> None: ...

    def release(self) -> None: ...

    def overhear(self, item: object) -> None: ...

    def is_ended_by(self, item: object) -> bool:
        return False


@pytest.fixture
def link() -> FakeMesh:
    return Hub().join("b")


@pytest.fixture
def thread(link: FakeMesh) -> Iterator[RunThread]:
    thread = RunThread(link, link.report)
    thread.start()
    yield thread
    thread.close()


def test_what_comes_without_a_run_is_dropped(link: FakeMesh, thread: RunThread) -> None:
    for number in range(3000):
        link.put(DeviceLost("gone", node="c") if number % 3 else Message("c", {"kind": "activation"}))
    until(link.inbox.empty, 20)
    check_that_it_computes(link, thread)


def test_a_link_that_is_closed_does_not_end_the_thread(
    link: FakeMesh, thread: RunThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def closed(**given: Any) -> None:
        asked.append(given)
        raise MeshError("data link: is closed")

    monkeypatch.setattr(link, "receive", closed)
    until(lambda: len(asked) > 2, 20)


def test_of_a_run_that_has_begun_nothing_is_dropped(link: FakeMesh, thread: RunThread) -> None:
    for number in range(STEPS):
        run: Any = Run(link)
        thread.begin(run)
        link.put(Message("a", {"number": number}))
        until(lambda run=run: bool(run.found), 20)  # type: ignore[misc]
        assert run.found == [number]
        thread.end()
        if number % 3:
            time.sleep(0.001 * (number % 7))


def check_that_it_computes(link: FakeMesh, thread: RunThread) -> None:
    run: Any = Run(link)
    thread.begin(run)
    link.put(Message("a", {"number": 7}))
    until(lambda: bool(run.found), 20)
    assert run.found == [7], "and nothing of what came before"


def test_a_run_that_is_ended_while_its_coordinator_is_to_be_told_ends_no_thread(
    link: FakeMesh, thread: RunThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order ends the run just when the thread looks at it."""
    asked: list[float] = []

    def end_just_now() -> float:
        asked.append(time.monotonic())
        thread.end()
        return asked[-1]

    run: Any = Run(link)
    thread.begin(run)
    monkeypatch.setattr(run_thread, "time", SimpleNamespace(monotonic=end_just_now))
    link.put(DeviceLost("gone", node="a"))
    until(lambda: len(asked) > 1, 20)
    monkeypatch.undo()  # else it ends the run that follows, too, if that begins just then
    check_that_it_computes(link, thread)


def test_weights_that_are_not_given_back_end_no_thread(
    link: FakeMesh, thread: RunThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = Run(link)
    asked: list[object] = []

    def refuse() -> None:
        asked.append(None)
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(run, "release", refuse)
    thread.begin(run)
    link.put(DeviceLost("gone", node="a"))
    until(lambda: bool(asked), 20)
    until(lambda: thread.run is None, 20)
    check_that_it_computes(link, thread)


def test_where_the_thread_has_ended_no_run_begins(
    link: FakeMesh, thread: RunThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(link, "receive", fail)
    until(lambda: not thread._thread.is_alive(), 20)
    run: Any = Run(link)
    with pytest.raises(MeshError, match=r"computes no more .*RuntimeError.*; start it anew"):
        thread.begin(run)


def test_what_fails_when_others_are_told_ends_no_thread(
    link: FakeMesh, thread: RunThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each order after that waited half a minute for a pass that nobody computed."""
    told: list[str] = []

    def fail(model: str) -> None:
        told.append(model)
        if model:
            raise RuntimeError("on purpose")

    monkeypatch.setattr(thread._shown, "tell", fail)
    run: Any = Run(link)
    thread.begin(run)
    until(lambda: thread.run is None, 20)
    thread.end()
    assert "some.gguf" in told
    monkeypatch.undo()
    check_that_it_computes(link, thread)


def test_a_run_whose_link_is_closed_is_given_up(
    link: FakeMesh, thread: RunThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked again at once, and wrote a line each time."""
    run: Any = Run(link)
    asked: list[float] = []

    def closed(timeout_s: float) -> None:
        asked.append(timeout_s)
        raise MeshError("data link: is closed")

    monkeypatch.setattr(run, "command", closed)
    thread.begin(run)
    until(lambda: thread.run is None, 20)
    assert len(asked) < 5
    check_that_it_computes(link, thread)
