"""Orders that come: carried out once each, however often they come, and however many wait."""

from __future__ import annotations

import queue
import threading

import pytest

from edge_run.base.fields import Document
from edge_run.devices.mesh.orders import MOST_WAITING, InboundOrder, OrderExecutor
from waiting import until


def test_an_order_that_was_carried_out_is_not_again_though_it_came_to_a_full_queue() -> None:
    done, answered, go_on = list[Document](), queue.Queue[int](), threading.Event()

    def handle(node: str, epoch: int, order: Document) -> Document:
        done.append(order["n"])  # type: ignore[arg-type]
        assert order["n"] == 0 or go_on.wait(20)
        return {}

    executor = OrderExecutor(handle, lambda node, epoch: True, lambda order, answer: answered.put(order.number))
    orders = [InboundOrder("a", "1", 1, number, {"n": number}) for number in range(MOST_WAITING + 2)]
    try:
        executor.give(orders[0])
        assert answered.get(timeout=60) == 0
        executor.give(orders[1])
        until(lambda: done == [0, 1], 20)
        for order in orders[2:]:
            executor.give(order)
        executor.give(orders[0])  # again, and it has no room
        go_on.set()
        for _ in orders[1:]:
            answered.get(timeout=60)
        executor.give(orders[0])
        assert answered.get(timeout=60) == 0, "the answer that was kept"
        assert done == list(range(len(orders)))
    finally:
        go_on.set()
        executor.close(5)


def test_it_ends_though_its_queue_is_emptied_just_when_room_is_made_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = OrderExecutor(lambda node, epoch, order: {}, lambda node, epoch: True, lambda order, answer: None)
    with monkeypatch.context() as patch:

        def refuse(_: object) -> None:
            patch.undo()
            raise queue.Full

        patch.setattr(executor._orders, "put_nowait", refuse)
        executor.close(5)
    assert not executor._thread.is_alive()
