"""What a device holds while it is attacked: the resident memory of a real member, before, at its peak, and after.

Strangers come to the data link's port with noise and with keys that nobody knows, and to the broker with control
messages that were heard there, said again, cut short, with a wrong bit, on other topics, and with noise. Then a member
that went wrong, whose key is known, sends what cannot be: truncated, foreign, oversized, with gaps, in too many parts;
and more than anybody takes. It announces a key that is none and ports of the device itself, and connects more often
than the device may have files open (256). Afterwards the device must still answer another member. Then the same with
the embedded broker, whose process is measured too: strangers, and members that went wrong, fill it. Needs mosquitto;
the peak is measured from the start of each attack on (`/proc/PID/clear_refs`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import paho.mqtt.client as paho
import zmq
from _box import ROOT, write_results

sys.path.insert(0, str(ROOT / "tests"))

from edge_run.base.errors import EdgeRunError
from edge_run.base.units import MIB
from edge_run.devices.broker.access import MEMBER
from edge_run.devices.broker.embedded import EmbeddedBroker
from edge_run.devices.link.connection import Candidate, Keys, Peer
from edge_run.devices.link.frames import MOST_FRAME_BYTES, MOST_PARTS, FrameKind, Head, pack
from edge_run.devices.members.cluster import BROKER_PASSWORD, Cluster, new_cluster, write_cluster
from edge_run.devices.mesh.node import LocalNode
from edge_run.devices.mesh.opening import MeshConfig, open_mesh
from edge_run.devices.mesh.serving import access_of
from mosquitto import Mosquitto
from mqtt_client import RawClient, connect_packet, publish_packet, subscribe_packet

COUNT = 1000
WHEN = ("before", "peak", "after")
Rows: TypeAlias = list[dict[str, Any]]


def memory(process: int) -> tuple[int, int]:
    """Return what a process holds now, and its peak, in bytes."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024, int(lines["VmHWM"].split()[0]) * 1024


def forget_peak(process: int) -> None:
    Path(f"/proc/{process}/clear_refs").write_text("5")


class Victim:
    """A member in a process of its own, that sends back what it gets, and may have 256 files open."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, str(ROOT / "tests" / "mesh_member.py"), str(folder), "victim"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (256, 256))
        assert self.process.stdout is not None
        self.node = self.process.stdout.readline().strip()


class Attack:
    """What the attacks share: the victim's address, and the keys of a member, as whom some of them come."""

    def __init__(self, here: LocalNode, victim: Victim, broker_port: int, cluster: Cluster) -> None:
        self.rogue, self.victim = here, victim
        self.broker_port, self.cluster, self.root = broker_port, cluster, f"edge/v1/{cluster.id}"
        here.link.send(victim.node, {"hello": 1}, timeout_s=10)
        here.link.receive(timeout_s=10)
        peer = here.link._service.peers[victim.node]
        self.peer: Peer = peer
        self.port = int(peer.places[0].rpartition(":")[2])
        self.context = zmq.Context()
        self.connection = time.time_ns()

    @contextlib.contextmanager
    def candidate(self, keys: Keys | None = None) -> Any:
        """A connection of this member's, or of whoever has `keys`."""
        candidate = Candidate(self.context, self.peer.places[0], self.peer, keys or self.rogue.link._service.keys)
        try:
            until = time.monotonic() + (5 if keys is None else 0.05)
            while candidate.watch() != "ready" and time.monotonic() < until:
                time.sleep(0.005)
            candidate.socket.setsockopt(zmq.SNDTIMEO, 3000)
            with contextlib.suppress(zmq.Again):  # it was cut off
                yield candidate.socket
        finally:
            candidate.close()

    def head(self, sequence: int = 0) -> bytes:
        self.connection += 1
        return pack(Head(FrameKind.DATA, self.connection, sequence, {"n": 0}))


def noise(attack: Attack) -> None:
    chance = random.Random(5)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
    for number in range(COUNT):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", attack.port), 2) as stranger:
            parts = (os.urandom(300), greeting[: chance.randrange(1, 64)], greeting + os.urandom(200))
            stranger.sendall(parts[number % 3])


def unknown_keys(attack: Attack) -> None:
    for _ in range(COUNT // 10):
        with attack.connected(Keys(*zmq.curve_keypair())) as sock, contextlib.suppress(zmq.Again):
            sock.send_multipart([attack.head(), bytes(1 << 20)], zmq.NOBLOCK)


def malformed(attack: Attack) -> None:
    chance = random.Random(9)
    with attack.connected() as sock:
        for number in range(COUNT):
            frame, parts = bytearray(attack.head()), [b"part"]
            if number % 5 == 0:
                del frame[chance.randrange(len(frame)) :]
            elif number % 5 == 1:
                frame[chance.randrange(4)] ^= 1 + chance.randrange(255)
            elif number % 5 == 2:
                frame = bytearray(attack.head(sequence=7))
            elif number % 5 == 3:
                parts *= MOST_PARTS + 1
            else:
                frame = bytearray(bytes(frame[:20]) + b"{" * 30_000)
            sock.send_multipart([bytes(frame), *parts])


def oversized(attack: Attack) -> None:
    block = bytes(MOST_FRAME_BYTES + 1)
    for _ in range(5):
        with attack.connected() as sock:
            sock.send_multipart([attack.head(), block], copy=False)
            time.sleep(0.2)


def flood(attack: Attack) -> None:
    """Messages that could be, as fast as they go: 2 GiB."""
    block = bytes(32 * MIB)
    with attack.connected() as sock:
        connection = attack.connection = attack.connection + 1
        for number in range(64):
            sock.send_multipart([pack(Head(FrameKind.DATA, connection, number, {"n": number})), block])
        time.sleep(1)


def many_parts(attack: Attack) -> None:
    """A message of 2 GiB in parts of 8 MiB."""
    block = bytes(8 * MIB)
    with attack.connected() as sock:
        sock.send_multipart([attack.head(), *[block] * 256], copy=False)
        time.sleep(3)


def control(attack: Attack) -> None:
    """What goes over the broker, heard and said again, cut short, with a wrong bit, by 1,000; and 250 KB of noise."""
    chance, heard = random.Random(3), []
    client = paho.Client(paho.CallbackAPIVersion.VERSION2)
    client.on_message = lambda _, __, message: heard.append((message.topic, message.payload))
    client.connect("127.0.0.1", attack.broker_port)
    client.subscribe("edge/v1/#")
    client.loop_start()
    attack.rogue.report({"busy": 1})
    time.sleep(12)  # a heartbeat, and what was kept
    client.unsubscribe("edge/v1/#")
    for number in range(COUNT):
        topic, payload = chance.choice(heard)
        spoiled = bytearray(payload or b"x")
        if number % 4 == 1:
            del spoiled[chance.randrange(len(spoiled)) :]
        elif number % 4 == 2:
            spoiled[chance.randrange(len(spoiled))] ^= 1 << chance.randrange(8)
        elif number % 4 == 3:
            topic = f"{topic.rpartition('/')[0]}/cmd"
            spoiled = bytearray(chance.randbytes(250_000)) if number % 8 == 3 else spoiled
        client.publish(topic, bytes(spoiled), qos=1).wait_for_publish(5)
    client.loop_stop()
    client.disconnect()


def bad_key(attack: Attack) -> None:
    """A key of 40 spaces, and places of the victim's own machine, announced for three seconds."""
    with attack.rogue.held() as state:
        good = state.link
    for link in ({"key": " " * 40, "places": ["tcp://127.0.0.1:9999"]}, {**good, "places": ["tcp://127.0.0.1:22"]}):
        for _ in range(15):
            with attack.rogue.held() as state:
                state.link = link
                state.announce()
            time.sleep(0.1)
    with attack.rogue.held() as state:
        state.link = good
        state.announce()


def too_many(attack: Attack) -> None:
    """748 connections that say nothing, to a device that may have 256 files open."""
    with contextlib.ExitStack() as stack:
        for _ in range(748):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(("127.0.0.1", attack.port), 0.2))
        time.sleep(3)


ATTACKS: dict[str, Callable[[Attack], None]] = {
    "noise of strangers, 1,000 connections": noise,
    "keys that nobody knows, 100 connections": unknown_keys,
    "748 connections that say nothing": too_many,
    "the broker: 1,000 control messages": control,
    "a member: a key and places that are none": bad_key,
    "a member: 1,000 messages that cannot be": malformed,
    "a member: 5 frames that are too large": oversized,
    "a member: 2 GiB in messages of 32 MiB": flood,
    "a member: a message of 2 GiB in 256 parts": many_parts,
}


def speaks(attack: Attack, client: str) -> RawClient:
    """A connection to the embedded broker of somebody who knows the members' password."""
    one = RawClient(attack.broker_port, connect_packet(client, MEMBER, attack.cluster.derive(BROKER_PASSWORD)))
    one.answer()
    one.socket.settimeout(0.5)
    return one


def rubbish(attack: Attack) -> None:
    """100 MB to be kept, of a stranger."""
    for number in range(20):
        with contextlib.suppress(OSError), RawClient(attack.broker_port, connect_packet("stranger")) as one:
            one.socket.sendall(publish_packet(f"x/{number}", b"A" * 5_000_000, is_kept=True))


def idle(attack: Attack) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(1000):
            with contextlib.suppress(OSError):
                one = stack.enter_context(RawClient(attack.broker_port))
                one.socket.sendall((b"", b"\x10", b"\x10\xff\x7f" + bytes(16_000))[number % 3])
        time.sleep(2)


def heads(attack: Attack) -> None:
    """Packets of 256 MiB are announced, and begun."""
    for number in range(COUNT):
        with contextlib.suppress(OSError), RawClient(attack.broker_port) as one:
            one.socket.sendall((b"\x10", b"\x31")[number % 2] + b"\xff\xff\xff\x7f" + bytes(60_000))


def names(attack: Attack) -> None:
    for _ in range(COUNT // 10):
        with contextlib.suppress(OSError):
            RawClient(attack.broker_port, connect_packet(attack.victim.node)).close()


def kept(attack: Attack) -> None:
    """For ten seconds, as much to be kept as the broker takes."""
    end_s = time.monotonic() + 10
    with speaks(attack, "rogue") as one:
        number = 0
        while time.monotonic() < end_s:
            number += 1
            with contextlib.suppress(OSError):
                one.socket.sendall(publish_packet(f"{attack.root}/plan/{number}", b"A" * 250_000, is_kept=True))


def deaf(attack: Attack) -> None:
    """40 that listen to all and take nothing, while one speaks as fast as it may for ten seconds."""
    end_s = time.monotonic() + 10
    with contextlib.ExitStack() as stack:
        for number in range(40):
            stack.enter_context(speaks(attack, f"deaf{number}")).socket.sendall(subscribe_packet(f"{attack.root}/#"))
        one = stack.enter_context(speaks(attack, "speaker"))
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError):
                one.socket.sendall(publish_packet(f"{attack.root}/node/speaker/load", b"B" * 250_000))


def halves(attack: Attack) -> None:
    """100 connections with nearly a packet each."""
    with contextlib.ExitStack() as stack:
        for number in range(100):
            with contextlib.suppress(OSError):
                one = stack.enter_context(speaks(attack, f"half{number}"))
                one.socket.sendall(publish_packet(f"{attack.root}/plan/1", b"C" * 290_000)[:-1])
        time.sleep(2)


def small(attack: Attack) -> None:
    with contextlib.suppress(OSError), speaks(attack, "small") as one:
        for number in range(1, 200):
            one.socket.sendall(subscribe_packet(*(f"{attack.root}/plan/{number}{i}" for i in range(60)), number=number))
        one.socket.sendall(
            b"".join(publish_packet(f"{attack.root}/plan/{n}", b"x", is_kept=True) for n in range(50_000))
        )


BROKER_ATTACKS: dict[str, Callable[[Attack], None]] = {
    "a stranger: 100 MB to be kept": rubbish,
    "a stranger: 1,000 connections that say little": idle,
    "a stranger: 1,000 packets of 256 MiB": heads,
    "a stranger: the victim's name, 100 times": names,
    "a member: all that it may have kept, 10 s": kept,
    "40 members that take nothing, 10 s": deaf,
    "a member: 100 packets that do not end": halves,
    "a member: 12,000 filters, 50,000 kept messages": small,
}


def is_well(here: LocalNode, victim: Victim) -> bool:
    """Whether the victim still answers."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            here.link.send(victim.node, {"still": "here"}, timeout_s=5)
            while (message := here.link.receive(timeout_s=2)) is not None:
                if message.header == {"still": "here"}:
                    return True
        except EdgeRunError:
            time.sleep(0.5)
    return False


def meet(folder: Path, cluster: Cluster, port: int, attacks: dict[str, Callable[[Attack], None]], broker: int) -> Rows:
    """Carry out `attacks` on a victim of `cluster`, and on the process `broker` of its broker, where that is ours."""
    rows: Rows = []
    for name in ("here", "rogue", "victim"):
        write_cluster(folder / name, cluster)
    victim = Victim(folder / "victim")
    here, rogue = (open_mesh(MeshConfig(folder=folder / name, name=name)) for name in ("here", "rogue"))
    try:
        until = time.monotonic() + 10
        while min(len(here.members()), len(rogue.members())) < 3 and time.monotonic() < until:
            time.sleep(0.1)
        attack = Attack(rogue, victim, port, cluster)
        processes = {"device": victim.process.pid, **({"broker": broker} if broker else {})}
        for what, act in attacks.items():
            before = {}
            for name, process in processes.items():
                forget_peak(process)
                before[name] = memory(process)[0]
            act(attack)
            row: dict[str, Any] = {"attack": what}
            for name, process in processes.items():
                now, peak = memory(process)
                sizes = (before[name], peak, now)
                row |= {f"{name}_{when}_mib": round(n / MIB) for when, n in zip(WHEN, sizes, strict=True)}
            rows.append({**row, "answers after it": is_well(here, victim)})
            print(rows[-1], flush=True)
    finally:
        here.close()
        rogue.close()
        victim.process.kill()
        victim.process.wait()
    return rows


def table(rows: Rows) -> list[str]:
    heads = list(rows[0]) if rows else []
    return [
        f"| {' | '.join(head.replace('_', ' ').removesuffix(' mib') for head in heads)} |",
        "|---" * len(heads) + "|",
        *(f"| {' | '.join(str(row[head]) for head in heads)} |" for row in rows),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    given = parser.parse_args()

    def chosen(attacks: dict[str, Callable[[Attack], None]]) -> dict[str, Callable[[Attack], None]]:
        return {what: act for what, act in attacks.items() if given.only in what}

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        broker = Mosquitto(folder)
        broker.start()
        try:
            rows = meet(folder / "1", new_cluster(broker.url), broker.port, chosen(ATTACKS), 0)
        finally:
            broker.stop()
        cluster = new_cluster(f"mqtt://127.0.0.1:{broker.port}")
        with contextlib.closing(EmbeddedBroker("127.0.0.1", broker.port, access_of(cluster))) as embedded:
            more = meet(folder / "2", cluster, broker.port, chosen(BROKER_ATTACKS), embedded.process_id)
    if not given.only:
        text = [
            __doc__ or "",
            "Resident memory in MiB.",
            "",
            *table(rows),
            "With the embedded broker:",
            "",
            *table(more),
        ]
        write_results("mesh-attack", [*rows, *more], "\n".join(text))


if __name__ == "__main__":
    main()
