"""What attacks on a device of a mesh share: the victim, and what somebody knows who comes as a member."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import zmq
from _box import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from edge_run.devices.link.connection import Candidate, Keys, Peer
from edge_run.devices.link.frames import FrameKind, Head, pack
from edge_run.devices.mesh.node import LocalNode
from mesh_lists import Members

COUNT = 1000


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

    def __init__(self, here: LocalNode, victim: Victim, broker_port: int, members: Members) -> None:
        self.rogue, self.victim = here, victim
        self.broker_port, self.members, self.root = broker_port, members, f"edge/v1/{members.cluster.id}"
        here.link.send(victim.node, {"hello": 1}, timeout_s=10)
        here.link.receive(timeout_s=10)
        peer = here.link._service.peers[victim.node]
        self.peer: Peer = peer
        self.port = int(peer.places[0].rpartition(":")[2])
        self.context = zmq.Context()
        self.connection = time.time_ns()

    @contextlib.contextmanager
    def connected(self, keys: Keys | None = None) -> Any:
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

    def head(self, sequence: int = 0, sizes: tuple[int, ...] = ()) -> bytes:
        self.connection += 1
        return pack(Head(FrameKind.DATA, self.connection, sequence, {"n": 0}, sizes))


Attacks: TypeAlias = Mapping[str, Callable[[Attack], None]]
