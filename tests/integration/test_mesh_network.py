"""The mesh with a real mosquitto and real processes, which are killed, frozen and cut off."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paho.mqtt.client as mqtt
import pytest

from edge_run import __version__
from edge_run.base.errors import Cancelled, DeviceLost, MeshError, NotTrusted, ProtocolError
from edge_run.base.mesh import Joined, Lost, MeshEvent, Unled
from edge_run.devices.broker import embedded
from edge_run.devices.broker.embedded import EmbeddedBroker
from edge_run.devices.members.cluster import Cluster, new_cluster, write_cluster
from edge_run.devices.members.identity import make_identity
from edge_run.devices.mesh.node import LocalNode
from edge_run.devices.mesh.opening import MeshConfig, open_mesh
from edge_run.devices.mesh.serving import access_of
from edge_run.devices.presence import membership
from mosquitto import Mosquitto, mosquitto
from patience import PATIENT
from program import Program, begin
from slow_relay import relay

MEMBER = Path(__file__).parents[1] / "mesh_member.py"
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "QUICK", PATIENT)
    monkeypatch.setattr(embedded, "START_S", 60.0)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(tmp_path) as one:
        yield one


@pytest.fixture
def cluster(broker: Mosquitto) -> Cluster:
    return new_cluster(broker.url)


class Table:
    """Members of one cluster, in this process and in others."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder, self.cluster, self.stack = folder, cluster, contextlib.ExitStack()

    def open(self, name: str, **settings: object) -> LocalNode:
        write_cluster(self.folder / name, self.cluster)
        settings = {"connect_s": WAIT_S, **settings}
        node = open_mesh(MeshConfig(self.folder / name, name=name, **settings))  # type: ignore[arg-type]
        self.stack.callback(node.close)
        return node

    def start(self, name: str) -> tuple[subprocess.Popen[str], str]:
        """Start a member in a process of its own; return it and its node."""
        write_cluster(self.folder / name, self.cluster)
        member = Program([str(self.folder / name), name], script=str(MEMBER))
        process = begin(member, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.stack.callback(self._end, process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate(timeout=60)


@pytest.fixture
def table(tmp_path: Path, cluster: Cluster) -> Iterator[Table]:
    one = Table(tmp_path, cluster)
    with one.stack:
        yield one


def until(is_so: Callable[[], object], seconds: float = 60.0) -> float:
    """Wait until something is so; return how long it took."""
    started = time.monotonic()
    while not is_so():
        assert time.monotonic() - started < seconds, "it did not come to be"
        time.sleep(0.02)
    return time.monotonic() - started


def event_of(node: LocalNode, kind: type, seconds: float = WAIT_S) -> MeshEvent:
    """Return the next event of a kind."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for event in node.wait(timeout_s=0.2):
            if isinstance(event, kind):
                return event
    raise AssertionError(f"no {kind.__name__} came")


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


def test_a_newcomer_that_does_not_hear_this_device_is_not_counted_on(table: Table, broker: Mosquitto) -> None:
    cut = threading.Event()
    with relay(broker.port, 1e8, cut) as port:
        a = table.open("a", broker=f"mqtt://127.0.0.1:{port}")
        cut.set()
        table.start("worker")
        time.sleep(1.0)
        assert len(a.members()) == 1


def test_strangers_at_the_broker(table: Table, broker: Mosquitto, tmp_path: Path) -> None:
    """500 messages of somebody who is at the broker and does not know the secret, and of all that he overheard."""
    a, b = table.open("a"), table.open("b")
    until(lambda: len(a.members()) == 2)
    epoch = a.lead(timeout_s=WAIT_S)
    done: list[int] = []
    b.serve(lambda node, epoch, order: {"count": done.append(1) or len(done)})
    overheard: list[tuple[str, bytes]] = []
    stranger = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
    stranger.on_message = lambda client, data, message: overheard.append((message.topic, message.payload))
    subscribed = threading.Event()
    stranger.on_subscribe = lambda *_: subscribed.set()
    stranger.connect("127.0.0.1", broker.port)
    stranger.subscribe("edge/v1/#", 1)
    stranger.loop_start()
    try:
        assert subscribed.wait(WAIT_S)
        assert a.order(b.node, {"do": 1}, timeout_s=WAIT_S) == {"count": 1}
        until(lambda: any(topic.endswith("/cmd") for topic, _ in overheard))

        def views() -> tuple[object, ...]:
            return a.members(), b.members(), a.state.lease.holder, b.state.lease.epoch

        state = views()
        chance, genuine = random.Random(3), list(overheard)
        for number in range(500):
            topic, payload = chance.choice(genuine)
            kind = number % 5
            if kind == 0:
                payload = payload[: chance.randrange(len(payload))]
            elif kind == 1:
                payload = os.urandom(200)
            elif kind == 2:
                topic = chance.choice(genuine)[0]
            elif kind == 3:
                payload = payload[:100] + bytes([payload[100] ^ 1]) + payload[101:]
            stranger.publish(topic, payload, qos=1)
        until(lambda: b.state.refusals.total > 250)
        time.sleep(0.5)
    finally:
        stranger.disconnect()
        stranger.loop_stop()
    assert len(done) == 1, "an order is carried out once"
    until(lambda: views() == state)  # on a busy machine one may have missed the other for a moment
    assert a.state.lease.held == epoch
    assert len(b.state.refusals.latest) <= 64
    assert a.order(b.node, {"do": 2}, timeout_s=WAIT_S) == {"count": 2}


def test_another_secret_is_refused(table: Table, broker: Mosquitto, tmp_path: Path) -> None:
    a = table.open("a")
    false = Cluster(table.cluster.id, bytes(32), broker.url)
    write_cluster(tmp_path / "false", false)
    with contextlib.closing(open_mesh(MeshConfig(tmp_path / "false", connect_s=WAIT_S))) as other:
        a.announce({})
        until(lambda: a.state.refusals.count(NotTrusted) and other.state.refusals.count(NotTrusted))
        assert len(a.members()) == len(other.members()) == 1


def test_users_and_passwords(tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"
    passwords.touch(mode=0o600)
    if not shutil.which("mosquitto_passwd"):
        pytest.skip("mosquitto_passwd is not installed")
    subprocess.run(["mosquitto_passwd", "-b", str(passwords), "edge", "word"], check=True, timeout=WAIT_S)
    with mosquitto(tmp_path, f"allow_anonymous false\npassword_file {passwords}") as broker:
        place = f"127.0.0.1:{broker.port}"
        write_cluster(tmp_path / "a", new_cluster(f"mqtt://{place}"))
        for wrong, who in ((None, "nobody without"), (f"mqtt://edge:wrong@{place}", "'edge'")):
            with pytest.raises(MeshError, match=who) as caught:
                open_mesh(MeshConfig(tmp_path / "a", wrong, connect_s=6))
            assert "wrong" not in str(caught.value)
        open_mesh(MeshConfig(tmp_path / "a", f"mqtt://edge:word@{place}", connect_s=WAIT_S)).close()


def test_no_broker_is_said_in_one_line(tmp_path: Path) -> None:
    write_cluster(tmp_path, new_cluster("mqtt://127.0.0.1:1"))
    before = {*threading.enumerate()}
    with pytest.raises(MeshError, match="nothing listens there"):
        open_mesh(MeshConfig(tmp_path, connect_s=4))
    assert {*threading.enumerate()} <= before, "no thread of it stays"


def test_the_embedded_broker_is_one(tmp_path: Path) -> None:
    port = Mosquitto(tmp_path).port
    cluster = new_cluster(f"mqtt://127.0.0.1:{port}")
    with contextlib.closing(EmbeddedBroker("127.0.0.1", port, access_of(cluster, make_identity(time.time).device))):
        table = Table(tmp_path, cluster)
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
            EmbeddedBroker("127.0.0.1", port, access_of(cluster, make_identity(time.time).device))


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
