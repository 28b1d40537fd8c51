"""`edge-run batch`: Ctrl-C ends it whatever it waits for."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

pytest.importorskip("msgspec")
pytest.importorskip("starlette")

from edge_run.base.errors import Cancelled
from edge_run.cli.commands import batch
from edge_run.cli.shared.terminal import Terminal
from edge_run.runtime.batches.answering import PlacesHere


@pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    or threading.current_thread() is not threading.main_thread(),
    reason="Ctrl-C is somebody else's here",
)
@pytest.mark.parametrize("moment", ["before the event loop", "before the first pass"])
def test_ctrl_c_ends_what_is_no_pass(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    n_cancelled = 0

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def cancel() -> None:
        nonlocal n_cancelled
        n_cancelled += 1

    @contextlib.contextmanager
    def opened(*_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(cancel=cancel)

    @contextlib.asynccontextmanager
    async def places_of(*_: Any) -> AsyncIterator[None]:
        yield None

    async def wait(places: None) -> None:
        if moment == "before the first pass":
            threading.Thread(target=press).start()  # the event loop sleeps meanwhile
        with anyio.fail_after(60):
            await anyio.sleep_forever()

    run_loop = anyio.run

    def run(*arguments: Any) -> None:
        if moment == "before the event loop":
            press()
        run_loop(*arguments)

    monkeypatch.setattr(batch, "opened", opened)
    monkeypatch.setattr(PlacesHere, "of", places_of)
    monkeypatch.setattr(anyio, "run", run)
    settings: Any = SimpleNamespace(
        is_mesh=False, model=None, config=None, chat_template=None, sampling=None, max_tokens=None
    )
    with pytest.raises(Cancelled):
        batch._run_here(settings, Terminal(), lambda: SimpleNamespace(run=wait))  # type: ignore[arg-type,return-value]
    assert n_cancelled == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_insists_ends_a_batch_whose_drive_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = list[int]()
    monkeypatch.setattr(batch, "end_with", lambda message, code: codes.append(code))
    ending = batch._Ending(lambda: None)
    for n_times in (1, 2, 3):
        ending.end()
        assert codes == [Cancelled.exit_code] * (n_times == 3)
