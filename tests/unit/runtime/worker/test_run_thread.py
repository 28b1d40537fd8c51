"""The thread of a worker: while it has no run, what comes is nobody's; of a run, no message is missed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edge_run.base.errors import DeviceLost, MeshError
from edge_run.base.mesh import Message
from edge_run.runtime.worker.run_thread import RunThread
from fake_mesh import FakeMesh, Hub

STEPS = 60


class Run:
    """Stands for a `WorkerRun`, and for its transport and engine: notes the messages that come to it."""

    coordinator, epoch, is_over = "a", 1, False

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

    def is_ended_by(self, item: object) -> bool:
        return False


@pytest.fixture
def link() -> FakeMesh:
    return Hub().join("b")


@pytest.fixture
def thread(link: FakeMesh) -> Iterator[RunThread]:
    thread = RunThread(link)
    thread.start()
    yield thread
    thread.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_what_comes_without_a_run_is_dropped(link: FakeMesh, thread: RunThread) -> None:
    for number in range(3000):
        link.put(DeviceLost("gone", node="c") if number % 3 else Message("c", {"kind": "activation"}))
    wait_until(link.inbox.empty)


def test_a_link_that_is_closed_does_not_end_the_thread(
    link: FakeMesh, thread: RunThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def closed(**given: Any) -> None:
        asked.append(given)
        raise MeshError("data link: is closed")

    monkeypatch.setattr(link, "receive", closed)
    wait_until(lambda: len(asked) > 2)


def test_of_a_run_that_has_begun_nothing_is_dropped(link: FakeMesh, thread: RunThread) -> None:
    for number in range(STEPS):
        run: Any = Run(link)
        thread.begin(run)
        link.put(Message("a", {"number": number}))
        wait_until(lambda run=run: bool(run.found))  # type: ignore[misc]
        assert run.found == [number]
        thread.end()
        if number % 3:
            time.sleep(0.001 * (number % 7))
