"""A member of a mesh in a process of its own, for tests: answers orders, sends back what comes over the data link.

mesh_member.py FOLDER NAME [LISTEN]; it prints its node when it takes part, and leaves when its standard input ends.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

from edge_run.base.errors import EdgeRunError, MeshError
from edge_run.base.fields import Document
from edge_run.devices.mesh.opening import MeshConfig, open_mesh
from edge_run.devices.presence import membership
from patience import PATIENT


def answer(node: str, epoch: int, order: Document) -> Document:
    if "refuse" in order:
        raise MeshError(str(order["refuse"]))
    return {"echo": order, "epoch": epoch, "from": node}


def main(folder: str, name: str, listen: str = "127.0.0.1") -> None:
    membership.QUICK = PATIENT  # it is others that tests have lose someone
    mesh = open_mesh(MeshConfig(Path(folder), name=name, listen=(listen,), connect_s=60, capabilities={"name": name}))
    mesh.serve(answer)
    ended = threading.Event()

    def send_back() -> None:
        while not ended.is_set():
            with contextlib.suppress(EdgeRunError):
                message = mesh.link.receive(timeout_s=0.2)
                if message is not None:
                    mesh.link.send(message.node, message.header, message.parts, timeout_s=20)

    thread = threading.Thread(target=send_back)
    thread.start()
    print(mesh.node, flush=True)
    sys.stdin.read()
    ended.set()
    thread.join()
    mesh.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
