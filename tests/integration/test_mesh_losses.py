"""Members of a mesh and its broker that are killed, frozen, cut off or not there: who notices, and what goes on."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from edge_run.base.errors import DeviceLost, MeshError
from edge_run.base.mesh import Joined, Lost
from edge_run.devices.mesh.opening import MeshConfig, open_mesh
from mesh_lists import make_cluster
from mesh_table import WAIT_S, Table, event_of
from mosquitto import Mosquitto
from slow_relay import relay
from waiting import until

pytestmark = pytest.mark.usefixtures("patient_mesh")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_freezes_in_a_conversation(table: Table, how: signal.Signals) -> None:
    a = table.open("a")
    process, node = table.start("worker")
    until(lambda: len(a.members()) == 2)
    a.lead(timeout_s=WAIT_S)
    a.link.send(node, {"n": 1}, [memoryview(b"activation")], timeout_s=WAIT_S)
    assert a.link.receive(timeout_s=WAIT_S) is not None
    started = time.monotonic()
    process.send_signal(how)
    with pytest.raises(DeviceLost) as caught:
        a.link.receive(timeout_s=60)
    assert time.monotonic() - started < 20.0
    assert caught.value.node == node
    lost = event_of(a, Lost)
    assert time.monotonic() - started < 30.0, "nobody leads for 32 s"
    assert isinstance(lost, Lost)
    assert lost.node == node
    if how is signal.SIGSTOP:
        process.send_signal(signal.SIGCONT)
        event_of(a, Joined)
        assert a.order(node, {"again": 1}, timeout_s=WAIT_S)["echo"] == {"again": 1}
        a.link.send(node, {"n": 2}, timeout_s=WAIT_S)
        while (message := a.link.receive(timeout_s=WAIT_S)) is not None and message.header != {"n": 2}:
            pass
        assert message is not None


def test_a_worker_that_was_killed_comes_back_in_a_new_incarnation(table: Table) -> None:
    a = table.open("a")
    process, node = table.start("worker")
    until(lambda: len(a.members()) == 2)
    a.lead(timeout_s=WAIT_S)
    a.link.send(node, {}, timeout_s=WAIT_S)
    process.kill()
    process.wait(60)
    event_of(a, Lost)
    _, again = table.start("worker")
    assert again == node
    event_of(a, Joined)
    with contextlib.suppress(DeviceLost):
        while a.link.receive(timeout_s=0.2) is not None:
            pass
    a.link.send(node, {"incarnation": 2}, timeout_s=WAIT_S)
    until(lambda: (m := a.link.receive(timeout_s=1)) is not None and m.header == {"incarnation": 2})
    assert a.order(node, {}, timeout_s=WAIT_S)["echo"] == {}


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_the_broker_goes_away_and_answers_go_on(table: Table, broker: Mosquitto, how: str) -> None:
    a = table.open("a")
    _, node = table.start("worker")
    until(lambda: len(a.members()) == 2)
    epoch = a.lead(timeout_s=WAIT_S)
    a.link.send(node, {"n": 0}, timeout_s=WAIT_S)
    assert a.link.receive(timeout_s=WAIT_S) is not None
    a.wait(timeout_s=0)
    broker.stop() if how == "killed" else broker.freeze()
    for number in range(12):
        a.link.send(node, {"n": number}, timeout_s=WAIT_S)
        message = a.link.receive(timeout_s=WAIT_S)
        assert message is not None
        assert message.header == {"n": number}
        time.sleep(0.4)
    assert a.order(node, {"without": "broker"}, timeout_s=WAIT_S)["epoch"] == epoch
    assert a.is_connected == (how == "frozen")
    assert len(a.members()) == 2
    assert not a.wait(timeout_s=0)
    broker.start() if how == "killed" else broker.thaw()
    until(lambda: a.is_connected and a.order(node, {"back": 1}, timeout_s=WAIT_S)["epoch"] == epoch)
    assert a.state.lease.held == epoch
    assert not a.wait(timeout_s=0)


def test_an_order_that_cannot_arrive_ends_soon(table: Table, broker: Mosquitto) -> None:
    """What this device says does not reach the broker any more, and the other's data link does not answer."""
    cut = threading.Event()
    with relay(broker.port, 1e8, cut) as port:
        a, b = table.open("a", broker=f"mqtt://127.0.0.1:{port}"), table.open("b")
        until(lambda: len(a.members()) == 2)
        a.lead(timeout_s=WAIT_S)
        b.link.close()
        cut.set()
        started = time.monotonic()
        with pytest.raises(DeviceLost, match="neither through the broker nor over the data link"):
            a.order(b.node, {}, timeout_s=90)
        assert time.monotonic() - started < 45


def test_a_newcomer_that_does_not_hear_this_device_is_not_counted_on(
    table: Table, broker: Mosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = threading.Event()
    with relay(broker.port, 1e8, cut) as port:
        a = table.open("a", broker=f"mqtt://127.0.0.1:{port}")
        take_in, heard = a.state.take_in, set[str]()

        def note(topic: str, payload: bytes, **how: Any) -> None:
            take_in(topic, payload, **how)
            heard.add(topic)

        monkeypatch.setattr(a.state, "take_in", note)
        cut.set()
        _, node = table.start("worker")
        until(lambda: any(topic.endswith(f"/node/{node}/caps") for topic in heard.copy()))
        assert len(a.members()) == 1, "though it announced itself here"


def test_no_broker_is_said_in_one_line(tmp_path: Path) -> None:
    make_cluster(tmp_path.parent, "mqtt://127.0.0.1:1", [tmp_path.name])
    before = {*threading.enumerate()}
    with pytest.raises(MeshError, match="nothing listens there"):
        open_mesh(MeshConfig(tmp_path, connect_s=4))
    assert {*threading.enumerate()} <= before, "no thread of it stays"


def test_a_device_that_takes_part_no_more_waits_for_nothing(table: Table) -> None:
    """The thread of its link, or of its channel, ended by a mistake, while it waited for an answer or the lease."""
    a, b = table.open("a"), table.open("b")
    until(lambda: len(a.members()) == 2)
    a.lead(timeout_s=WAIT_S)
    answered = threading.Event()
    b.serve(lambda *_: {"is_late": answered.wait(30)})
    timer = threading.Timer(0.3, lambda: a._end("the data link", "on purpose"))
    timer.start()
    started = time.monotonic()
    try:
        with pytest.raises(MeshError, match=r"the data link ended \(on purpose\); this device has left, start it anew"):
            a.order(b.node, {"order": "status"}, timeout_s=60)
        for wait in (a.lead, a.wait_connected):
            with pytest.raises(MeshError, match="this device has left"):
                wait(timeout_s=60)
    finally:
        answered.set()
        timer.join()
    assert time.monotonic() - started < 45
