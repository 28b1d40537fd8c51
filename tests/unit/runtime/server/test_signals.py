"""Signals of a server: what is read anew at SIGHUP keeps none of the others waiting."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

pytest.importorskip("uvicorn")

from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.server.access import Access
from edge_run.runtime.server.serving import ServeOptions, _hear_signals

WAIT_S = 20


class Served:
    """A server without requests, whose keys lie on a drive that may hang."""

    def __init__(self) -> None:
        self.server: Any = SimpleNamespace(config=SimpleNamespace(ssl=None), should_exit=False)
        self.guard: Any = SimpleNamespace(access=None)
        self.catalogue = SimpleNamespace(is_fixed=True, is_usable=True)
        admission = SimpleNamespace(n_running=0, n_waiting=0, close=lambda: None, cancel=lambda: None)
        self.service: Any = SimpleNamespace(admission=admission, catalogue=self.catalogue)
        self.answers, self.n_reads = threading.Event(), 0
        self.said = list[str]()
        self.access: Any = object()
        self.told = list[str]()
        manager: Any = SimpleNamespace(
            reloading=lambda: self.told.append("reloading"), ready=self.told.append, stopping=lambda: None
        )
        self.options = ServeOptions(self.access, 1, SamplingConfig(), read_access=self.read, manager=manager)

    def read(self) -> Access:
        self.n_reads += 1
        assert self.answers.wait(WAIT_S)
        return self.access  # type: ignore[no-any-return]

    async def hear(self) -> None:
        await _hear_signals(self.server, self.guard, self.service, self.options, self.said.append)


async def until(is_so: Callable[[], object]) -> None:
    """Wait until something is so."""
    with anyio.fail_after(WAIT_S):
        while not is_so():  # noqa: ASYNC110 (nobody tells it)
            await anyio.sleep(0.01)


def test_a_drive_that_hangs_at_sighup_does_not_keep_the_server_from_ending() -> None:
    served = Served()

    async def run() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(served.hear)
            await anyio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: served.n_reads)
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: served.server.should_exit)
            group.cancel_scope.cancel()

    try:
        anyio.run(run)
    finally:
        served.answers.set()
    assert served.guard.access is None


@pytest.mark.parametrize("is_usable", [True, False], ids=["open", "not open"])
def test_what_is_asked_while_it_is_read_is_read_once_more(is_usable: bool) -> None:
    served = Served()
    served.catalogue.is_usable = is_usable

    async def run() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(served.hear)
            await anyio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: served.n_reads)
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)
                await anyio.sleep(0.05)
            served.answers.set()
            await until(lambda: len(served.said) == 2)
            await anyio.sleep(0.05)
            group.cancel_scope.cancel()

    anyio.run(run)
    assert served.said == ["read anew who may ask"] * 2
    assert served.told == ["reloading", "read anew what may change"] * (2 if is_usable else 0)
    assert served.guard.access is served.access


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_insists_ends_the_process_whatever_hangs(number: int) -> None:
    served, cancels = Served(), list[int]()
    served.service.admission.cancel = lambda: cancels.append(1)
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    seen = list[bool]()

    async def run() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(served.hear)
            await anyio.sleep(0.05)
            os.kill(os.getpid(), number)
            await until(lambda: served.server.should_exit)
            seen.append(signal.getsignal(number) == signal.SIG_DFL)
            os.kill(os.getpid(), number)
            await until(lambda: cancels)
            await until(lambda: signal.getsignal(number) == signal.SIG_DFL)
            group.cancel_scope.cancel()

    try:
        anyio.run(run)
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
    assert seen == [False]
