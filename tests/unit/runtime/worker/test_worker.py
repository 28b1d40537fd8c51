"""When a worker frees the model: after the order at hand, and a while after the one that it was opened for is gone."""

from __future__ import annotations

import errno
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import MeshError, TierReadError, lacks_room
from edge_run.runtime.worker.worker import ORPHAN_S, Worker
from fake_mesh import Hub


def test_an_order_at_hand_is_carried_out_before_the_model_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    began, go_on = threading.Event(), threading.Event()

    class Engine:
        def close(self) -> None:
            events.append("freed")

    worker = Worker(Hub().join("b"), [], ModelConfig())
    engine: Any = Engine()
    worker._engine = engine

    def prepare(*given: object) -> dict[str, object]:
        began.set()
        assert go_on.wait(20)
        events.append("prepared")
        return {}

    monkeypatch.setattr(worker, "_prepare", prepare)
    orders = threading.Thread(target=worker.handle, args=("a", 1, {"order": "prepare"}))
    orders.start()
    assert began.wait(20)
    closing = threading.Thread(target=worker.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    go_on.set()
    closing.join(20)
    orders.join(20)
    assert events == ["prepared", "freed"]
    with pytest.raises(MeshError, match="no more part"):
        worker.handle("a", 1, {"order": "prepare"})
    worker.close()


def test_the_model_of_one_that_is_gone_stays_for_a_minute_after_its_run_however_long_that_was() -> None:
    freed: list[object] = []
    worker = Worker(Hub().join("b"), [], ModelConfig())
    engine: Any = SimpleNamespace(close=lambda: freed.append(None))
    run: Any = SimpleNamespace(end=lambda: None)
    worker._engine = engine
    worker._runs.begin(run)
    worker._runs.end()
    worker._free_orphan()
    assert not freed, "it may have lost touch for a moment only"
    worker._runs.ended_s -= 2 * ORPHAN_S
    worker._free_orphan()
    assert freed


def test_what_the_system_refuses_in_an_order_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of another kind is "a mistake of edge-run's own" to the coordinator."""
    worker = Worker(Hub().join("b"), [], ModelConfig())

    def prepare(*_: object) -> dict[str, object]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/models")

    monkeypatch.setattr(worker, "_prepare", prepare)
    with pytest.raises(TierReadError, match=r"carrying out an order: /models: No space left on device") as caught:
        worker.handle("a", 1, {"order": "prepare"})
    assert lacks_room(caught.value)
    worker.close()
