"""Members of a mesh over a real broker: who is there, who leads, and that what the leader orders is done."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from edge_run import __version__
from edge_run.base.errors import Cancelled, DeviceLost, MeshError, ProtocolError
from edge_run.base.mesh import Lost, Unled
from edge_run.devices.broker.embedded import EmbeddedBroker
from edge_run.devices.mesh import opening
from edge_run.devices.mesh.node import LocalNode
from edge_run.devices.mesh.opening import MeshConfig, open_mesh
from edge_run.devices.mesh.serving import access_of
from mesh_lists import Members
from mesh_table import WAIT_S, Table, event_of
from mosquitto import Mosquitto
from waiting import until

pytestmark = pytest.mark.usefixtures("patient_mesh")


def test_members_find_each_other_and_leave(table: Table) -> None:
    a = table.open("a", capabilities={"memory_bytes": 1})
    b = table.open("b")
    until(lambda: len(a.members()) == len(b.members()) == 2)
    assert {member.name for member in b.members()} == {"a", "b"}
    assert next(m for m in b.members() if m.name == "a").capabilities == {"memory_bytes": 1, "edge_run": __version__}
    with pytest.raises(ProtocolError, match="no JSON"):
        a.announce({"rate": float("nan")})
    with pytest.raises(ProtocolError, match="at most"):
        a.report({"words": "x" * 200_000})
    a.announce({"memory_bytes": 2})
    until(lambda: {m.capabilities.get("memory_bytes") for m in b.members()} == {None, 2})
    a.report({"tokens_per_s": 1.5})
    looking = table.open("looking", is_watching=True)
    until(lambda: looking.state.loads.get(a.node, {}).get("tokens_per_s") == 1.5)
    assert not b.state.loads, "who computes has no use for it"
    b.close()
    lost = event_of(a, Lost)
    assert lost == Lost(b.node, "it left")
    assert not a.state.refusals.total


def test_a_newcomer_sees_who_was_there_and_the_plan(table: Table) -> None:
    a = table.open("a")
    epoch = a.lead(timeout_s=WAIT_S)
    a.publish_plan(epoch, {"model": "m", "layers": {}})
    b = table.open("b")
    until(lambda: b.state.plan == (epoch, {"model": "m", "layers": {}}) and len(b.members()) == 2)
    assert b.state.lease.holder == a.node


def test_orders(table: Table) -> None:
    a = table.open("a")
    process, node = table.start("worker")
    until(lambda: len(a.members()) == 2)
    with pytest.raises(MeshError, match="does not lead"):
        a.order(node, {}, timeout_s=1)
    epoch = a.lead(timeout_s=WAIT_S)
    assert a.order(node, {"do": [1, 2]}, timeout_s=WAIT_S) == {"echo": {"do": [1, 2]}, "epoch": epoch, "from": a.node}
    with pytest.raises(MeshError, match="no room for that"):
        a.order(node, {"refuse": "no room for that"}, timeout_s=WAIT_S)
    with pytest.raises(DeviceLost):
        a.order("a" * 16, {}, timeout_s=1)
    process.kill()
    with pytest.raises(DeviceLost):
        a.order(node, {}, timeout_s=WAIT_S)


def test_one_leads_at_a_time_and_the_earlier_is_not_obeyed(table: Table) -> None:
    a, b = table.open("a"), table.open("b")
    _, node = table.start("worker")
    until(lambda: len(a.members()) == len(b.members()) == 3)
    first = a.lead(timeout_s=WAIT_S)
    until(lambda: b.state.lease.holder == a.node)
    with pytest.raises(MeshError, match="leads"):
        b.lead(timeout_s=1)
    stale = a.state.outbound.number
    a.resign()
    second = b.lead(timeout_s=WAIT_S)
    assert second > first
    with a.held() as state:  # as somebody would who has not heard of it
        incarnation = next(one.incarnation for one in a.members() if one.node == node)
        number, pending = state.outbound.add(node, incarnation, first, {"do": "old"})
        state.send_order(number)
    assert number == stale + 1
    until(lambda: pending.is_done)
    assert "is past" in str(pending.error)
    until(lambda: a.state.lease.holder == b.node)
    third = a_leads_over(b, a)
    assert event_of(b, Unled) == Unled(second)
    assert third > second


def a_leads_over(b: LocalNode, a: LocalNode) -> int:
    """Have `a` take the lease as it would where it had not heard that b renews it."""
    with a.held() as state:
        state.lease._holder, state.lease._retry_s = None, 0.0
        state.want_lease()
    return a.lead(timeout_s=WAIT_S)


def test_the_embedded_broker_is_one(tmp_path: Path) -> None:
    port = Mosquitto(tmp_path).port
    members = Members(f"mqtt://127.0.0.1:{port}", f"127.0.0.1:{port}")
    access = access_of(members.cluster, members.founder)
    with contextlib.closing(EmbeddedBroker("127.0.0.1", port, access)):
        table = Table(tmp_path, members)
        with table.stack:
            a, b = table.open("a"), table.open("b")
            until(lambda: len(a.members()) == 2)
            b.serve(lambda node, epoch, order: order)
            a.lead(timeout_s=WAIT_S)
            assert a.order(b.node, {"x": 1}, timeout_s=WAIT_S) == {"x": 1}
            a.resign()
            looking = table.open("looking", is_watching=True)
            until(lambda: len(looking.members()) == 2 and looking.state.lease.epoch)
            time.sleep(1.0)
            assert not looking.state.refusals.total, "it hands on twice what it keeps, which is nobody's attack"
        with pytest.raises(MeshError, match="cannot listen"):
            EmbeddedBroker("127.0.0.1", port, access)


def stop() -> None:
    raise Cancelled("enough")


def test_waiting_for_the_broker_and_for_the_lease_is_stopped_at_once(table: Table, broker: Mosquitto) -> None:
    a, b = table.open("a"), table.open("b")
    a.lead(timeout_s=WAIT_S)
    started = time.monotonic()
    with pytest.raises(Cancelled):
        b.lead(timeout_s=90, check=stop)
    broker.stop()
    until(lambda: not b.is_connected)
    with pytest.raises(Cancelled):
        b.wait_connected(timeout_s=90, check=stop)
    with pytest.raises(Cancelled):
        open_mesh(MeshConfig(table.folder / "a", connect_s=90), stop)
    assert time.monotonic() - started < 45


def test_a_device_says_its_new_addresses_when_it_is_connected_anew_and_keeps_the_links_that_it_can(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was given another address, or had none when it started, was left out of runs until it was restarted."""
    a, b = table.open("a"), table.open("b")
    until(lambda: len(a.members()) == len(b.members()) == 2)
    a.link.send(b.node, {"n": 0}, timeout_s=WAIT_S)
    assert b.link.receive(timeout_s=WAIT_S) is not None

    def move_to(*addresses: str) -> None:
        places = [f"tcp://{address}:{b.link.port}" for address in addresses]
        monkeypatch.setattr(opening, "own_addresses", lambda listen: addresses)
        b._channel.reconnect()
        until(lambda: (found := a.state.membership.link_of(b.node)) and found[1]["places"] == places)

    move_to("127.0.0.1", "127.0.0.9")
    a.link.send(b.node, {"n": 1}, timeout_s=WAIT_S)
    message = b.link.receive(timeout_s=WAIT_S)
    assert message is not None
    assert message.header == {"n": 1}
    assert a.link.receive(timeout_s=0.5) is None, "no loss was told"
    move_to("127.0.0.9")
    with pytest.raises(DeviceLost, match="has another address"):
        a.link.receive(timeout_s=WAIT_S)
