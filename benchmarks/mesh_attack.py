"""What a device holds while it is attacked: the resident memory of a real member, before, at its peak, and after.

Strangers come to the data link's port with noise and with keys that nobody knows, and to the broker with control
messages that were heard there, said again, cut short, with a wrong bit, on other topics, and with noise. Then a member
that went wrong, whose key is known, sends what cannot be: truncated, foreign, oversized, with gaps, in too many parts;
and more than anybody takes. Afterwards the device must still answer another member. Needs mosquitto; the peak is
measured from the start of each attack on (`/proc/PID/clear_refs`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import zmq
from _box import ROOT, write_results

sys.path.insert(0, str(ROOT / "tests"))

from edge_run.base.errors import EdgeRunError
from edge_run.base.units import MIB
from edge_run.devices.link_frames import MOST_FRAME_BYTES, MOST_PARTS, Head, Kind, pack
from edge_run.devices.link_lane import Candidate, Keys, Peer
from edge_run.devices.mesh import MeshConfig, open_mesh
from edge_run.devices.mesh_cluster import new_cluster, write_cluster
from edge_run.devices.mesh_node import MeshNode
from mosquitto import Mosquitto

COUNT = 1000


class Victim:
    """A member in a process of its own, that sends back what it gets."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, str(ROOT / "tests" / "mesh_member.py"), str(folder), "victim"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        self.node = self.process.stdout.readline().strip()

    def memory(self) -> tuple[int, int]:
        """Return what it holds now, and its peak, in bytes."""
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines())
        return int(lines["VmRSS"].split()[0]) * 1024, int(lines["VmHWM"].split()[0]) * 1024

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")


class Attack:
    """What the attacks share: the victim's address, and the keys of a member, as whom some of them come."""

    def __init__(self, here: MeshNode, victim: Victim, broker_port: int) -> None:
        self.rogue = here
        self.broker_port = broker_port
        here.link.send(victim.node, {"hello": 1}, timeout_s=10)
        here.link.receive(timeout_s=10)
        peer = here.link._service.peers[victim.node]
        self.peer: Peer = peer
        self.port = int(peer.places[0].rpartition(":")[2])
        self.context = zmq.Context()
        self.lane = time.time_ns()

    @contextlib.contextmanager
    def way(self, keys: Keys | None = None) -> Any:
        """A connection of this member's, or of whoever has `keys`."""
        way = Candidate(self.context, self.peer.places[0], self.peer, keys or self.rogue.link._service.keys)
        try:
            until = time.monotonic() + (5 if keys is None else 0.05)
            while way.watch() != "ready" and time.monotonic() < until:
                time.sleep(0.005)
            way.socket.setsockopt(zmq.SNDTIMEO, 3000)
            with contextlib.suppress(zmq.Again):  # it was cut off
                yield way.socket
        finally:
            way.close()

    def head(self, sequence: int = 0) -> bytes:
        self.lane += 1
        return pack(Head(Kind.DATA, self.lane, sequence, {"n": 0}))


def noise(attack: Attack) -> None:
    chance = random.Random(5)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
    for number in range(COUNT):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", attack.port), 2) as stranger:
            parts = (os.urandom(300), greeting[: chance.randrange(1, 64)], greeting + os.urandom(200))
            stranger.sendall(parts[number % 3])


def unknown_keys(attack: Attack) -> None:
    for _ in range(COUNT // 10):
        with attack.way(Keys(*zmq.curve_keypair())) as sock, contextlib.suppress(zmq.Again):
            sock.send_multipart([attack.head(), bytes(1 << 20)], zmq.NOBLOCK)


def malformed(attack: Attack) -> None:
    chance = random.Random(9)
    with attack.way() as sock:
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
        with attack.way() as sock:
            sock.send_multipart([attack.head(), block], copy=False)
            time.sleep(0.2)


def flood(attack: Attack) -> None:
    """Messages that could be, as fast as they go: 2 GiB."""
    block = bytes(32 * MIB)
    with attack.way() as sock:
        lane = attack.lane = attack.lane + 1
        for number in range(64):
            sock.send_multipart([pack(Head(Kind.DATA, lane, number, {"n": number})), block])
        time.sleep(1)


def many_parts(attack: Attack) -> None:
    """A message of 2 GiB in parts of 8 MiB."""
    block = bytes(8 * MIB)
    with attack.way() as sock:
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


ATTACKS: dict[str, Callable[[Attack], None]] = {
    "noise of strangers, 1,000 connections": noise,
    "keys that nobody knows, 100 connections": unknown_keys,
    "the broker: 1,000 control messages": control,
    "a member: 1,000 messages that cannot be": malformed,
    "a member: 5 frames that are too large": oversized,
    "a member: 2 GiB in messages of 32 MiB": flood,
    "a member: a message of 2 GiB in 256 parts": many_parts,
}


def is_well(here: MeshNode, victim: Victim) -> bool:
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        broker = Mosquitto(folder)
        broker.start()
        cluster = new_cluster(broker.url)
        for name in ("here", "rogue", "victim"):
            write_cluster(folder / name, cluster)
        victim = Victim(folder / "victim")
        here, rogue = (open_mesh(MeshConfig(folder=folder / name, name=name)) for name in ("here", "rogue"))
        try:
            until = time.monotonic() + 10
            while min(len(here.members()), len(rogue.members())) < 3 and time.monotonic() < until:
                time.sleep(0.1)
            attack = Attack(rogue, victim, broker.port)
            for what, act in ATTACKS.items():
                if given.only not in what:
                    continue
                victim.forget_peak()
                before, _ = victim.memory()
                act(attack)
                after, peak = victim.memory()
                mib = [round(size / MIB) for size in (before, peak, after)]
                fields = dict(zip(("before_mib", "peak_mib", "after_mib"), mib, strict=True))
                rows.append({"attack": what, **fields, "answers after it": is_well(here, victim)})
                print(rows[-1], flush=True)
        finally:
            here.close()
            rogue.close()
            victim.process.kill()
            victim.process.wait()
            broker.stop()
    lines = ["| attack | before | peak | after | answers after it |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(map(str, row.values()))} |" for row in rows]
    if not given.only:
        write_results("mesh-attack", rows, "\n".join([__doc__ or "", "Resident memory in MiB.", "", *lines]))


if __name__ == "__main__":
    main()
