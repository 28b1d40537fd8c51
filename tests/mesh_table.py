"""Members of one cluster over a real broker, in this process and in others."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path

from edge_run.base.mesh import MeshEvent
from edge_run.devices.mesh.node import LocalNode
from edge_run.devices.mesh.opening import MeshConfig, open_mesh
from mesh_lists import Members
from program import Program, begin

MEMBER = Path(__file__).with_name("mesh_member.py")
WAIT_S = 30.0


class Table:
    """Members of one cluster, in this process and in others."""

    def __init__(self, folder: Path, members: Members) -> None:
        self.folder, self.members, self.stack = folder, members, contextlib.ExitStack()

    def open(self, name: str, **settings: object) -> LocalNode:
        self.members.move_into(self.folder / name)
        settings = {"connect_s": WAIT_S, **settings}
        node = open_mesh(MeshConfig(self.folder / name, name=name, **settings))  # type: ignore[arg-type]
        self.stack.callback(node.close)
        return node

    def start(self, name: str) -> tuple[subprocess.Popen[str], str]:
        """Start a member in a process of its own; return it and its node."""
        self.members.move_into(self.folder / name)
        member = Program([str(self.folder / name), name], script=str(MEMBER))
        process = begin(member, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.stack.callback(self._end, process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate(timeout=60)


def event_of(node: LocalNode, kind: type, seconds: float = WAIT_S) -> MeshEvent:
    """Return the next event of a kind."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for event in node.wait(timeout_s=0.2):
            if isinstance(event, kind):
                return event
    raise AssertionError(f"no {kind.__name__} came")
