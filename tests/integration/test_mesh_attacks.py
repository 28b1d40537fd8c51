"""Members that went wrong, and what was recorded and is played back, at a real broker: what the others make of it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import paho.mqtt.client as mqtt
import pytest

import waiting
from amqtt_broker import amqtt
from edge_run.base.errors import DeviceLost, MeshError, NotTrusted, ProtocolError
from edge_run.base.fields import Document
from edge_run.base.mesh import Lost
from edge_run.devices.mesh.checkup import examine
from edge_run.devices.mesh.node import LocalNode
from edge_run.devices.mesh.opening import MeshConfig, open_mesh
from edge_run.devices.mesh.own_link import OwnLink
from edge_run.devices.messages.envelope import MOST_NUMBER
from edge_run.devices.presence import membership
from mesh_lists import Members
from mosquitto import Mosquitto, free_port, mosquitto
from patience import PATIENT

LIMIT_S = 30.0
until = partial(waiting.until, limit_s=LIMIT_S)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "QUICK", PATIENT)


class Table:
    """Members of one cluster; the rogue is one whose state a test changes."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.stack = folder, contextlib.ExitStack()
        self.members = Members(url)

    def open(self, name: str) -> LocalNode:
        node = open_mesh(MeshConfig(self.members.move_into(self.folder / name), name=name, connect_s=60))
        self.stack.callback(node.close)
        return node


@pytest.fixture
def table(tmp_path: Path, broker: Mosquitto) -> Iterator[Table]:
    one = Table(tmp_path, broker.url)
    with one.stack:
        yield one


def names(node: LocalNode) -> set[str]:
    return {member.name for member in node.members()}


def places_known(node: LocalNode, other: LocalNode) -> list[object]:
    """Return where `node` would connect to `other`; what it heard has reached its data link, too."""
    with node.held() as state:
        found = state.membership.link_of(other.node)
    return list(found[1]["places"]) if found else []  # type: ignore[call-overload]


def examined(folder: Path, topic: str, listen_s: float, word: str = "") -> list[str]:
    """Return what the doctor finds of `topic`; it listens for longer where it has not heard of `word` yet."""
    found: list[str] = []
    for times in (1, 4, 12):
        report = examine(folder, "0", listen_s=times * listen_s)
        found = [one.finding for one in report.findings if one.topic == topic]
        if any(word in finding for finding in found):
            break
    return found


def announce_link(rogue: LocalNode, link: Document) -> None:
    with rogue.held() as state:
        state.link = link
        rogue._own_link = OwnLink(lambda: link)  # or it would say again what is so
        state.announce()


class Recorder:
    """A stranger at the broker, who hears everything and says it again."""

    def __init__(self, port: int) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self._client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
        self._client.on_message = lambda _, __, message: self.heard.append((message.topic, message.payload))
        subscribed = threading.Event()
        self._client.on_subscribe = lambda *_: subscribed.set()
        self._client.connect("127.0.0.1", port)
        self._client.subscribe("edge/v1/#")
        self._client.loop_start()
        assert subscribed.wait(LIMIT_S)

    def of(self, end: str) -> list[tuple[str, bytes]]:
        return [(topic, payload) for topic, payload in self.heard if topic.endswith(end)]

    def play(self, topic: str, payload: bytes) -> None:
        self._client.publish(topic, payload, qos=1).wait_for_publish(LIMIT_S)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


@pytest.fixture
def recorder(broker: Mosquitto) -> Iterator[Recorder]:
    with contextlib.closing(Recorder(broker.port)) as one:
        yield one


def test_nobody_is_sent_to_ports_of_the_own_machine(table: Table) -> None:
    """A member names a port of loopback at which somebody else listens: it is never connected to."""
    a, rogue = table.open("a"), table.open("rogue")
    until(lambda: names(a) == {"a", "rogue"})
    with socket.create_server(("127.0.0.1", 0)) as service:
        place = f"tcp://127.0.0.1:{service.getsockname()[1]}"
        announce_link(rogue, {**rogue.state.link, "places": [place]})
        until(lambda: places_known(a, rogue) == [place])
        for ask in (
            lambda: a.link.measure(rogue.node, timeout_s=20),
            lambda: a.link.send(rogue.node, {}, timeout_s=20),
        ):
            with pytest.raises(DeviceLost, match="no address that may be tried"):
                ask()
        examine(table.folder / "a", "0", listen_s=1.5)
        service.settimeout(0)
        with pytest.raises(BlockingIOError):  # whoever came before would be in its queue
            service.accept()


def test_members_of_one_machine_reach_each_other(table: Table) -> None:
    a, b = table.open("a"), table.open("b")
    until(lambda: names(a) == names(b) == {"a", "b"})
    assert a.link.measure(b.node, timeout_s=LIMIT_S).bytes_per_s > 0


@pytest.mark.parametrize(
    "link",
    [
        {"key": " " * 40, "places": ["tcp://127.0.0.1:9999"]},
        {"key": "0" * 40, "places": []},
        {"places": ["tcp://0.0.0.0:9999"]},
        {"places": ["tcp://127.0.0.1:22"]},
        {"places": ["tcp://localhost:9999"]},
        {"places": 5},
        {"more": 1},
    ],
)
def test_an_announcement_of_a_link_that_can_be_none_is_refused(table: Table, link: Document) -> None:
    a, b, rogue = table.open("a"), table.open("b"), table.open("rogue")
    until(lambda: names(a) == names(b) == {"a", "b", "rogue"})
    before = a.state.refusals.count(ProtocolError)
    announce_link(rogue, {**rogue.state.link, **link})
    until(lambda: a.state.refusals.count(ProtocolError) > before)
    assert "data link" in str(a.state.refusals.latest[-1])
    a.link.send(b.node, {"still": "here"}, timeout_s=LIMIT_S)
    message = b.link.receive(timeout_s=LIMIT_S)
    assert message is not None
    assert message.header == {"still": "here"}


def test_who_has_no_data_link_any_more_leaves_visibly(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = table.open("a"), table.open("b")
    until(lambda: names(a) == names(b) == {"a", "b"})

    def fail() -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(b.link._service, "_watch_connections", fail)
    b.link._service.wake()
    until(lambda: names(a) == {"a"}, limit_s=20)  # less than for its silence
    assert any(isinstance(event, Lost) and event.why == "it left" for event in a.wait(timeout_s=1))
    with pytest.raises(MeshError, match=r"the data link ended .*broken on purpose.*; this device has left"):
        b.wait(timeout_s=1)
    with pytest.raises(MeshError, match="has left"):
        b.lead(timeout_s=1)
    assert "broken on purpose" in b.problem
    time.sleep(1.5)
    assert names(a) == {"a"}, "it does not come back by itself"


def test_who_can_say_nothing_any_more_leaves_visibly(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program said that it tried to connect again, for ever."""
    a, b = table.open("a"), table.open("b")
    until(lambda: names(a) == names(b) == {"a", "b"})

    def fail() -> float:
        raise ProtocolError("a message of 300000 bytes: over what is allowed")

    monkeypatch.setattr(b.state, "pass_time", fail)
    until(lambda: names(a) == {"a"}, limit_s=20)  # less than for its silence
    with pytest.raises(MeshError, match=r"the channel to the broker ended .*300000 bytes.*; this device has left"):
        b.wait(timeout_s=1)
    assert "300000 bytes" in b.problem


@pytest.mark.parametrize("kind", ["lease", "status", "plan"])
def test_an_epoch_that_cannot_be_keeps_nobody_from_leading(table: Table, kind: str) -> None:
    a, rogue = table.open("a"), table.open("rogue")
    until(lambda: names(a) == {"a", "rogue"})
    bodies: dict[str, Document] = {
        "lease": {"state": "free"},
        "status": {"state": "here", "session": 0},
        "plan": {"plan": {"layers": {}}},
    }
    with rogue.held() as state:
        state._send(kind, bodies[kind], epoch=MOST_NUMBER - 1)
    until(lambda: a.state.refusals.count(ProtocolError))
    assert a.lead(timeout_s=LIMIT_S) < MOST_NUMBER >> 1
    a.resign()
    late = table.open("late")  # who hears what the broker kept
    until(lambda: names(late) == {"a", "rogue", "late"})
    late.lead(timeout_s=LIMIT_S)
    late.resign()


def test_the_doctor_names_who_says_epochs_that_cannot_be(table: Table) -> None:
    rogue = table.open("rogue")

    is_over = threading.Event()

    def lie() -> None:
        while not is_over.wait(0.2):
            with rogue.held() as state:
                state._send("lease", {"state": "free"}, epoch=MOST_NUMBER - 1)

    liar = threading.Thread(target=lie)
    liar.start()
    table.members.move_into(table.folder / "own")
    try:
        (found,) = examined(table.folder / "own", "lease", 2.0)
    finally:
        is_over.set()
        liar.join()
    assert found.startswith("rogue: says epoch")
    assert f"says epoch {MOST_NUMBER - 1}" in found


def test_an_order_is_for_one_incarnation(table: Table, recorder: Recorder) -> None:
    """It is recorded, its receiver starts anew, and it is played back within a minute."""
    a, b = table.open("a"), table.open("b")
    done: list[str] = []

    def note(node: str, epoch: int, order: Document) -> Document:
        done.append(str(order["do"]))
        return {}

    b.serve(note)
    until(lambda: names(a) == names(b) == {"a", "b"})
    a.lead(timeout_s=LIMIT_S)
    a.order(b.node, {"do": "once"}, timeout_s=LIMIT_S)
    until(lambda: recorder.of("/cmd"))
    recorded = recorder.of("/cmd")
    b.close()
    again = table.open("b")
    assert again.node == b.node
    again.serve(note)
    until(lambda: names(a) == names(again) == {"a", "b"})
    for topic, payload in recorded:
        recorder.play(topic, payload)
    until(lambda: any("another incarnation" in str(one) for one in again.state.refusals.latest))
    assert done == ["once"]
    a.order(again.node, {"do": "anew"}, timeout_s=LIMIT_S)
    assert done == ["once", "anew"]
    before = a.state.refusals.total
    for topic, payload in recorder.of("/rsp"):
        recorder.play(topic, payload)
    until(lambda: a.state.refusals.total > before)


def test_who_is_gone_is_not_brought_back_by_what_he_said(table: Table, recorder: Recorder) -> None:
    """A device starts after another one has gone, and is played all that was recorded of that one."""
    gone, a = table.open("gone"), table.open("a")
    until(lambda: names(a) == {"a", "gone"})
    until(lambda: recorder.of(f"{gone.node}/caps") and recorder.of(f"{gone.node}/status"))
    recorded = [one for one in recorder.heard if gone.node in one[0]]
    gone.close()
    a.close()
    late = table.open("late")
    seen: set[str] = set()
    for topic, payload in recorded:
        recorder.play(topic, payload)
    end_s = time.monotonic() + 2
    while time.monotonic() < end_s:
        seen |= names(late)
        time.sleep(0.02)
    assert seen == {"late"}
    with pytest.raises(NotTrusted):
        late.link.send(gone.node, {}, timeout_s=0.5)


def take_name(port: int, node: str) -> None:
    """Connect for a moment under the id of a member, as who knows no secret can."""
    thief = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id=node)
    thief.connect("127.0.0.1", port)
    thief.loop_start()
    time.sleep(0.5)
    thief.disconnect()
    thief.loop_stop()


@pytest.mark.parametrize("kind", ["amqtt", "mosquitto"])
def test_whose_name_is_taken_at_the_broker_hears_again_soon(tmp_path: Path, kind: str) -> None:
    port = free_port()
    broker = amqtt(port) if kind == "amqtt" else mosquitto(tmp_path)
    with broker as one, contextlib.ExitStack() as stack:
        port = one.port if isinstance(one, Mosquitto) else port
        table = Table(tmp_path, f"mqtt://127.0.0.1:{port}")
        stack.enter_context(table.stack)
        a, b = table.open("a"), table.open("b")
        until(lambda: names(a) == names(b) == {"a", "b"})
        b.serve(lambda node, epoch, order: order)
        a.lead(timeout_s=LIMIT_S)  # heartbeats are frequent
        until(lambda: b.state.membership.is_hearing)
        take_name(port, b.node)
        until(lambda: not b.state.membership.is_hearing or b.state.connections > 1)
        until(lambda: b.state.membership.is_hearing and b.state.connections > 1)
        until(lambda: names(a) == names(b) == {"a", "b"})
        assert a.order(b.node, {"do": "it"}, timeout_s=LIMIT_S) == {"do": "it"}
        if kind == "amqtt":
            table.members.move_into(tmp_path / "own")
            found = examined(tmp_path / "own", "broker", 2.5, "b: did not hear itself")
            assert any("b: did not hear itself" in finding for finding in found)
