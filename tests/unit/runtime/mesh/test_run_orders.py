"""Orders to the devices of a run: all at once, and stopped with the run."""

from __future__ import annotations

import threading
import time

import pytest

from edge_run.base.errors import Cancelled
from edge_run.base.interrupt import Interrupt
from edge_run.base.mesh import Document
from edge_run.runtime.mesh.orders import RunOrders
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
