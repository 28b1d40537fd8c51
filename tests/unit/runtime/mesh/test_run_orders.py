"""Orders to the devices of a run: all at once, and stopped with the run."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.errors import Cancelled, MeshError
from edge_run.base.fields import Document
from edge_run.base.interrupt import Interrupt
from edge_run.base.mesh import HasLeft
from edge_run.base.units import format_size
from edge_run.runtime.mesh import coordinator
from edge_run.runtime.mesh import orders as run_orders
from edge_run.runtime.mesh.failover import Deposed, Gone, Refused
from edge_run.runtime.mesh.orders import Failed, RunOrders
from edge_run.tiers.pieces import PIECE_BYTES
from fake_mesh import Hub


def test_who_stops_a_run_does_not_wait_for_the_slowest_answer() -> None:
    hub, interrupt, go_on, closed = Hub(), Interrupt(), threading.Event(), list[str]()
    mesh = hub.join("a")

    def handle(node: str, coordinator: str, order: Document) -> Document:
        if order["order"] == "close":
            closed.append(node)
        elif node == "c":
            interrupt.cancel()
            go_on.wait(20)
        return {"node": node}

    for name in "bc":
        hub.join(name).serve(lambda coordinator, epoch, order, name=name: handle(name, coordinator, order))  # type: ignore[misc]
    orders = RunOrders(mesh, interrupt.check)
    assert orders.give({"b": {"order": "prepare"}}, 1.0) == {"b": {"node": "b"}}
    started = time.monotonic()
    orders.expect_release("b")
    with pytest.raises(Cancelled):
        orders.give({node: {"order": "prepare"} for node in "bc"}, 20.0)
    orders.release()
    assert closed == ["b"], "also when it is stopped"
    assert time.monotonic() - started < 10
    go_on.set()


def test_devices_that_fail_together_are_asked_once_and_one_that_reads_is_asked_again() -> None:
    hub, asked, said = Hub(), list[str](), list[str]()
    mesh = hub.join("a")

    def handle(node: str, order: Document) -> Document:
        asked.append(node)
        if node != "d":
            raise MeshError("no")
        done = asked.count("d")
        reading = {"file": "m.gguf", "read_bytes": done << 20, "size_bytes": 3 << 20}
        return {"room_bytes": 1} if done == 3 else {"reading": reading}

    for name in "bcd":
        hub.join(name).serve(lambda coordinator, epoch, order, name=name: handle(name, order))  # type: ignore[misc]
    orders = RunOrders(mesh, lambda: None, said.append)
    nodes = {"b", "c", "d"}
    for _ in range(2):
        with pytest.raises(Failed) as failed:
            orders.prepare({"order": "prepare"}, nodes, 20.0)
        nodes.discard(failed.value.event.node)
    assert nodes == {"d"}
    assert orders.prepare({"order": "prepare"}, nodes, 20.0) == {"d": {"room_bytes": 1}}
    assert sorted(asked) == ["b", "c", "d", "d", "d"]
    assert said == ["name of d reads m.gguf for the first time, to know it: 2 MiB of 3 MiB"]


def test_who_runs_a_model_for_the_first_time_is_told_how_far_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(3 * PIECE_BYTES))
    shards = [SimpleNamespace(path=path, size_bytes=3 * PIECE_BYTES)]
    engine: Any = SimpleNamespace(
        gguf=SimpleNamespace(shards=shards), config=SimpleNamespace(cache=tmp_path), interrupt=Interrupt()
    )
    monkeypatch.setattr(coordinator, "TELL_S", 0.0)
    said = list[str]()
    found = coordinator._fingerprint(engine, said.append)
    done, size = [format_size(n * PIECE_BYTES) for n in (1, 2, 3)], format_size(3 * PIECE_BYTES)
    assert said == [f"this device reads m.gguf for the first time, to know it: {one} of {size}" for one in done]
    assert coordinator._fingerprint(engine, said.append) == found
    assert len(said) == 3, "it is known"


def test_who_has_left_blames_nobody() -> None:
    hub = Hub()
    mesh = hub.join("a")
    left = HasLeft("mesh: the data link ended; this device has left, start it anew")

    def order(node: str, order: Document, *, timeout_s: float) -> Document:
        raise left

    mesh.order = order  # type: ignore[method-assign]
    orders = RunOrders(mesh, lambda: None)
    with pytest.raises(HasLeft):
        orders.prepare({"order": "prepare"}, {"b", "c"}, 1.0)
    stuck = orders.who_is_stuck(["b", "c"])
    assert isinstance(stuck, Deposed)
    assert stuck.why == left.message


def test_who_says_nonsense_of_what_it_does_is_done_without() -> None:
    """It ended the answer, of which a device that was stuck had been part."""
    hub = Hub()
    mesh = hub.join("a")
    hub.join("b").serve(lambda coordinator, epoch, order: {"place": 7})
    stuck = RunOrders(mesh, lambda: None).who_is_stuck(["b"])
    assert isinstance(stuck, Gone)
    assert stuck.node == "b"


def check_who_reads(said: Iterable[int], why: str) -> None:
    """Check that a device that says it has read so many bytes, each time it is asked, is refused in 400 times."""
    hub, asked, so_far = Hub(), list[None](), iter(said)
    mesh = hub.join("a")

    def handle(coordinator: str, epoch: int, order: Document) -> Document:
        asked.append(None)
        time.sleep(0.002)
        return {"reading": {"file": "m.gguf", "read_bytes": next(so_far), "size_bytes": 1 << 40}}

    def check() -> None:
        assert len(asked) < 400, "it is asked without end"

    hub.join("b").serve(handle)
    with pytest.raises(Failed) as failed:
        RunOrders(mesh, check).prepare({"order": "prepare"}, {"b"}, 20.0)
    refusal = failed.value.event
    assert isinstance(refusal, Refused)
    assert (refusal.node, why in refusal.why) == ("b", True), refusal.why


def test_who_begins_to_read_again_and_again_is_not_waited_for() -> None:
    check_who_reads(itertools.cycle((0, 1)), "has begun to read 64 files")


def test_who_reads_a_byte_at_a_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_orders, "STALL_S", 0.2)
    check_who_reads(itertools.count(), "hardly anything")
