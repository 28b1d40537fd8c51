"""When a worker frees the model: after the order at hand, and a while after the one that it was opened for is gone."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, MeshError, TierReadError, lacks_room
from edge_run.runtime.mesh.offers import IN_FLIGHT
from edge_run.runtime.worker import worker as module
from edge_run.runtime.worker.models import ModelAsked
from edge_run.runtime.worker.worker import ORPHAN_S, Worker
from edge_run.tiers.source import SourceFile
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
    closing.join(60)
    orders.join(60)
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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> ModelAsked:
    """The model that every order to prepare is of."""
    asked = ModelAsked("0" * 64, "m.gguf", (4096,), (64,))
    monkeypatch.setattr(module, "read_asked", lambda order: asked)
    monkeypatch.setattr(module, "read_settings", lambda order: {IN_FLIGHT: 1})
    monkeypatch.setattr(module, "config_from", lambda settings, config: config)
    monkeypatch.setattr(module, "room_document", lambda engine: {})
    return asked


def test_a_model_whose_file_was_written_to_is_opened_anew(
    asked: ModelAsked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pass of the open one would be refused, as long as it stays open."""
    path, events = tmp_path / "m.gguf", list[str]()
    path.write_bytes(bytes(4096))
    source = SourceFile(path)
    engine: Any = SimpleNamespace(
        gguf=SimpleNamespace(shards=[SimpleNamespace(path=path)]),
        loaded=SimpleNamespace(backing=SimpleNamespace(sources=[source])),
        release=lambda: events.append("released"),
        close=lambda: events.append("closed"),
    )
    worker = Worker(Hub().join("b"), [], ModelConfig())
    worker._engine, worker._opened = engine, (asked.model, {IN_FLIGHT: 1})
    reading: dict[str, Any] = {"file": "m.gguf", "read_bytes": 0, "size_bytes": 4096}
    monkeypatch.setattr(worker._files, "lacks", lambda engine: {})
    monkeypatch.setattr(worker._files, "look_for", lambda asked: reading)
    assert worker.handle("a", 1, {"order": "prepare"}) == {}
    assert events == ["released"], "it is as it was"
    os.utime(path, ns=(1, 1))
    with pytest.raises(MeshError, match="was deleted, or written to, meanwhile; the next run opens the model anew"):
        worker.handle("a", 1, {"order": "fetch"})
    assert worker.handle("a", 1, {"order": "prepare"}) == {"reading": reading}
    assert events == ["released", "closed"]
    source.close()
    worker.close()


def test_a_coordinator_is_watched_until_another_one_leads_or_it_lets_go(
    asked: ModelAsked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection to one that is watched stays for as long as that one is there."""
    mesh = Hub().join("b")
    worker = Worker(mesh, [], ModelConfig())
    monkeypatch.setattr(worker._files, "look_for", lambda asked: {"file": "m.gguf", "read_bytes": 0, "size_bytes": 1})
    worker.handle("a", 1, {"order": "prepare"})
    assert mesh.watched == {"a"}
    worker.handle("c", 2, {"order": "prepare"})
    assert mesh.watched == {"c"}
    worker.handle("c", 2, {"order": "close"})
    assert not mesh.watched
    worker.close()


def test_the_files_of_a_model_that_does_not_open_are_closed(
    asked: ModelAsked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was fetched of it is for one process at a time."""
    events = list[str]()
    worker = Worker(Hub().join("b"), [], ModelConfig())

    def begin(*_: object) -> tuple[Path, None]:
        events.append("opened")
        return tmp_path / "m.gguf", None

    def refuse(*_: object, **__: object) -> None:
        raise BudgetError("too little")

    monkeypatch.setattr(worker._files, "look_for", lambda asked: None)
    monkeypatch.setattr(worker._files, "open", begin)
    monkeypatch.setattr(worker._files, "release", lambda: events.append("closed"))
    monkeypatch.setattr(module.SliceEngine, "open", refuse)
    with pytest.raises(BudgetError):
        worker.handle("a", 1, {"order": "prepare"})
    assert events[-2:] == ["opened", "closed"]
    worker.close()
