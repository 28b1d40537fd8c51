"""The embedded broker under attack: strangers, members that went wrong, and the loss of who started it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_run.base.units import MIB
from edge_run.devices.broker import embedded
from edge_run.devices.broker.access import HOME, BrokerAccess
from edge_run.devices.broker.embedded import EmbeddedBroker
from edge_run.devices.broker.packets import write_packet
from edge_run.devices.mesh.opening import MeshConfig, broker_password, open_mesh
from edge_run.devices.mesh.serving import access_of, home_password
from mesh_lists import Members
from mosquitto import free_port, mosquitto
from mqtt_client import RawClient, connect_packet, publish_packet, subscribe_packet
from waiting import until

MEMBERS = Members("mqtt://127.0.0.1", "127.0.0.1:1883", spare=32)
CLUSTER, DEVICE = MEMBERS.cluster, MEMBERS.founder
MOST_GROWTH = 48 * MIB
SUBSCRIBED = b"\x90"
PATIENCE_S = 60.0  # of a broker with who does not say who it is, where that is not what ends a connection
SOON_S = 0.6 * PATIENCE_S  # not for its silence, and on a busy machine too


class Place:
    """A cluster's broker, and who connects to it."""

    root = f"edge/v1/{CLUSTER.id}"

    def __init__(self, broker: EmbeddedBroker, port: int) -> None:
        self.broker, self.port = broker, port
        self._devices = iter(MEMBERS.devices)
        self._users: dict[str, tuple[str, str]] = {}

    def user(self, who: str) -> tuple[str, str]:
        """Return the user and the password of a member, which is another one for each `who`."""
        if who not in self._users:
            device = next(self._devices)
            self._users[who] = device.node, broker_password(device, CLUSTER.id, DEVICE.seal_key)
        return self._users[who]

    def member(self, client: str, who: str = "", **more: int) -> RawClient:
        """Connect as `client`, of the member `who`, where that is not one of its own."""
        one = RawClient(self.port, connect_packet(client, *self.user(who or client), **more))
        assert one.answer() == 0
        return one

    def serves(self, within_s: float = 20.0) -> bool:
        """Whether what one member says reaches another one."""
        with self.member("listening") as a, self.member("speaking") as b:
            a.socket.sendall(subscribe_packet(f"{self.root}/node/+/status"))
            assert a.hears(SUBSCRIBED, within_s)
            b.socket.sendall(publish_packet(f"{self.root}/node/speaking/status", b"still here"))
            return a.hears(b"still here", within_s)

    def memory(self, what: str = "VmHWM") -> int:
        status = Path(f"/proc/{self.broker.process_id}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith(what)).split()[1]) * 1024


@pytest.fixture(autouse=True)
def _starts_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "START_S", 60.0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the broker wait longer for who does not say who it is: who is cut off before, is so for another reason."""
    setting = f"from edge_run.devices.broker import server; server.UNKNOWN_S = {PATIENCE_S}; from edge_run"
    start = embedded._START.replace("from edge_run", setting, 1)
    assert start != embedded._START
    monkeypatch.setattr(embedded, "_START", start)


@pytest.fixture
def place() -> Iterator[Place]:
    port = free_port()
    with contextlib.closing(EmbeddedBroker("127.0.0.1", port, access_of(CLUSTER, DEVICE))) as broker:
        yield Place(broker, port)


@pytest.mark.usefixtures("patient")
def test_strangers_are_not_let_in(place: Place) -> None:
    user, password = place.user("one")
    for packet in (
        connect_packet("stranger"),
        connect_packet("stranger", user, "guess"),
        connect_packet("stranger", "root", password),
        connect_packet("stranger", place.user("other")[0], password),
        connect_packet("a/b", user, password),  # an id that is part of no topic
        connect_packet("wills", user, password, will="edge/v1/other/node/x/status"),
    ):
        with RawClient(place.port, packet) as stranger:
            assert stranger.answer() != 0
            assert stranger.ended_within(SOON_S)
    with RawClient(place.port, publish_packet("x", b"rubbish", is_kept=True)) as stranger:
        assert stranger.ended_within(SOON_S)
    assert place.serves()


@pytest.mark.usefixtures("patient")
def test_a_message_is_refused_by_its_head_before_its_payload_comes(place: Place) -> None:
    huge = b"\x31\xff\xff\xff\x7f"  # 256 MiB are announced
    for client in (RawClient(place.port), place.member("big")):
        with client:
            client.socket.sendall(huge)
            assert client.ended_within(SOON_S)
    with RawClient(place.port, b"\x10\x80\x80\x02") as stranger:  # a CONNECT of 32 KiB
        assert stranger.ended_within(SOON_S)


def test_rubbish_does_not_stay_and_reaches_nobody(place: Place) -> None:
    """On topics of no cluster, and on the cluster's by a member that went wrong, as fast as it may speak."""
    start = place.memory("VmRSS")
    block = b"A" * 250_000
    with place.member("rogue") as rogue, place.member("honest") as honest:
        honest.socket.sendall(publish_packet(f"{place.root}/coord/lease", b"the lease", is_kept=True))
        rogue.socket.settimeout(20)
        with contextlib.suppress(OSError):  # it may be cut off
            for number in range(16):
                rogue.socket.sendall(publish_packet(f"x/{number}", block, is_kept=True))
                rogue.socket.sendall(publish_packet(f"{place.root}/plan/{number}", block, is_kept=True))
    assert place.memory() - start < MOST_GROWTH
    assert place.serves()
    with place.member("later") as later:
        later.socket.sendall(subscribe_packet("x/#", f"{place.root}/coord/lease"))
        assert later.hears(SUBSCRIBED, SOON_S)
        assert not later.hears(b"AAAA", 0.5), "what is on topics of no cluster is neither kept nor heard"


def test_who_takes_nothing_is_cut_off(place: Place) -> None:
    """A member listens to all and never reads, while another one speaks: neither grows the broker for long."""
    start = place.memory("VmRSS")
    with contextlib.ExitStack() as stack:
        deaf = [stack.enter_context(place.member(f"deaf{number}")) for number in range(20)]
        for one in deaf:
            one.socket.sendall(subscribe_packet(f"{place.root}/#"))
        speaker = stack.enter_context(place.member("speaker"))
        speaker.socket.settimeout(1)
        with contextlib.suppress(OSError):
            for _ in range(40):
                speaker.socket.sendall(publish_packet(f"{place.root}/node/speaker/load", b"B" * 250_000))
        time.sleep(0.5)
        assert place.memory() - start < MOST_GROWTH
        assert place.serves()


def test_connections_that_say_nothing_keep_nobody_out(place: Place) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(RawClient(place.port)) for _ in range(300)]
        assert place.serves()
        assert idle[0].ended_within(1), "the oldest makes room for the newest"
        assert idle[-1].ended_within(40), "and none may wait for long"
        until(lambda: len(os.listdir(f"/proc/{place.broker.process_id}/fd")) < 32)
    until(lambda: any("did not say who it is" in line for line in place.broker.findings))


def test_many_connections_of_members_keep_no_other_out(place: Place) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(170):
            packet = connect_packet(f"many{number}", *place.user(f"of many {number % 6}"))
            with contextlib.suppress(OSError):
                stack.enter_context(RawClient(place.port, packet))
        files = Path(f"/proc/{place.broker.process_id}/fd")
        until(lambda: 144 <= len(os.listdir(files)) < 160)  # members who come all at once are not taken for strangers
    assert place.serves()


def test_many_filters_and_many_small_messages(place: Place) -> None:
    start = place.memory("VmRSS")
    with place.member("rogue") as rogue:
        for number in range(1, 200):
            rogue.socket.sendall(
                subscribe_packet(*(f"{place.root}/plan/{number}{i}" for i in range(60)), number=number)
            )
        rogue.socket.settimeout(0.5)
        small = b"".join(publish_packet(f"{place.root}/plan/{n}", b"x", is_kept=True) for n in range(50_000))
        with contextlib.suppress(OSError):
            rogue.socket.sendall(small)
        assert place.serves(within_s=8.0), "who speaks fast waits, and the others do not"
    assert place.memory() - start < MOST_GROWTH


@pytest.mark.usefixtures("patient")
def test_who_may_not_be_in_any_more_is_cut_off_and_says_nothing_more(place: Place) -> None:
    access = access_of(CLUSTER, DEVICE)
    with place.member("watching") as watcher:
        watcher.socket.sendall(subscribe_packet(f"{place.root}/#"))
        packet = connect_packet("gone", *place.user("gone"), will=f"{place.root}/node/gone/status")
        with RawClient(place.port, packet) as gone:
            assert gone.answer() == 0
            user = place.user("watching")[0]
            place.broker.set_access(BrokerAccess({user: access.users[user]}))
            assert gone.ended_within(SOON_S)
            assert not watcher.hears(b"will", 0.5), "neither has its will a say"
        with RawClient(place.port, connect_packet("gone", *place.user("gone"))) as again:
            assert again.answer() != 0


@pytest.mark.usefixtures("patient")
def test_an_id_is_taken_over_by_its_own_user_only(place: Place) -> None:
    with place.member("same") as first:
        with RawClient(place.port, connect_packet("same", *place.user("other"))) as thief:
            assert thief.answer() == 2
        with place.member("same"):
            assert first.ended_within(SOON_S), "the old connection is closed, so its owner knows"


def test_it_ends_with_who_started_it_whatever_happened(tmp_path: Path) -> None:
    program = (
        "import sys, time; from edge_run.devices.broker.embedded import EmbeddedBroker\n"
        "from edge_run.devices.broker.access import BrokerAccess\n"
        f"broker = EmbeddedBroker('127.0.0.1', {free_port()}, BrokerAccess({{}}))\n"
        "print(broker.process_id, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner:
        child = int(owner.stdout.readline())
        owner.send_signal(signal.SIGKILL)
    until(lambda: not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes())


def test_it_is_started_anew_when_it_dies(place: Place) -> None:
    before = place.broker.process_id
    os.kill(before, signal.SIGKILL)
    until(lambda: place.broker.is_serving and place.broker.process_id != before)

    def is_back() -> bool:
        with contextlib.suppress(OSError, AssertionError):
            return place.serves()
        return False

    until(is_back)


def test_other_clients_of_mqtt_are_served(place: Place) -> None:
    """As Home Assistant would: a user of its own, who sees what is kept for it, and nothing of the cluster."""
    if not shutil.which("mosquitto_sub"):
        pytest.skip("mosquitto-clients is not installed")
    own = "homeassistant/sensor/abcdefghijklmnop/x/config"
    with place.member("abcdefghijklmnop") as node:
        node.socket.sendall(publish_packet(own, b"device", is_kept=True, number=1))
        node.socket.sendall(publish_packet(f"{place.root}/coord/lease", b"lease", is_kept=True))
    login = ["-p", str(place.port), "-u", HOME, "-P", home_password(CLUSTER, DEVICE)]
    command = ["mosquitto_sub", *login, "-v", "-t", "homeassistant/#", "-t", "edge/v1/#", "-q", "2"]
    for wait_s in ("1", "5", "20"):  # a busy machine takes more than a second to connect
        words = [*command, "-W", wait_s]
        heard = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout
        if heard:
            break
    assert heard == f"{own} device\n"
    wrong = [*login[:-1], "wrong", "-t", "homeassistant/status", "-m", "online"]
    assert subprocess.run(["mosquitto_pub", *wrong], capture_output=True, timeout=60, check=False).returncode


def test_a_packet_that_never_ends_does(place: Place) -> None:
    """Who begins a packet and goes on a byte at a time is silent."""
    with place.member("slow", keepalive_s=2) as slow:
        slow.socket.sendall(write_packet(0x30, bytes(1000))[:10])
        end_s = time.monotonic() + 60  # the packet would take 198 s
        with contextlib.suppress(OSError):
            while time.monotonic() < end_s:
                slow.socket.sendall(b"\0")
                time.sleep(0.2)
        assert time.monotonic() < end_s


def test_who_names_no_user_is_taken_also_where_the_broker_knows_other_users(tmp_path: Path) -> None:
    """The password that a member offers is not known there; then it comes as nobody, as it did before."""
    passwords = tmp_path / "passwords"
    passwords.touch(mode=0o600)
    if not shutil.which("mosquitto_passwd"):
        pytest.skip("mosquitto_passwd is not installed")
    subprocess.run(["mosquitto_passwd", "-b", str(passwords), "edge", "word"], check=True, timeout=60)
    with mosquitto(tmp_path, f"allow_anonymous true\npassword_file {passwords}") as broker:
        folder = Members(broker.url, "127.0.0.1:1883").move_into(tmp_path / "a")  # which offers a password
        open_mesh(MeshConfig(folder, connect_s=60)).close()


def test_who_asks_for_all_that_is_kept_many_times_takes_no_more_memory(place: Place) -> None:
    """Each time another member: one that had as much is not let in again so soon."""
    with place.member("rogue") as rogue:
        for number in range(8):
            rogue.socket.sendall(publish_packet(f"{place.root}/plan/{number}", bytes(120_000), is_kept=True))
        assert place.serves()
        start = place.memory()
        for number in range(5):
            with place.member(f"again{number}") as again, contextlib.suppress(OSError):
                again.socket.sendall(subscribe_packet(*[f"{place.root}/#"] * 64))
                time.sleep(0.2)
        assert place.serves()
    assert place.memory() - start < 24 << 20


def test_a_broker_that_was_stopped_holds_up_nobody(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STUCK_S", 0.5)
    access = access_of(CLUSTER, DEVICE)
    user = access.users[place.user("one")[0]]
    many = BrokerAccess({**access.users, **{f"m{number}": user for number in range(400)}})
    stopped = place.broker.process_id
    os.kill(stopped, signal.SIGSTOP)
    start_s = time.monotonic()
    for _ in range(3):
        place.broker.set_access(many)
    assert time.monotonic() - start_s < 30
    monkeypatch.setattr(embedded, "STUCK_S", 60.0)  # else one that only starts slowly is taken for stopped
    until(lambda: place.broker.is_serving and place.broker.process_id != stopped)
    until(lambda: _serves(place), 90)


def _serves(place: Place) -> bool:
    with contextlib.suppress(OSError, AssertionError):
        return place.serves()
    return False
