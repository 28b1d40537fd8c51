"""A worker of a mesh in a process of its own, as `edge-run mesh join` is, with the sizes that tests want.

    python mesh_worker.py FOLDER --models DIR --name NAME [--memory 4GiB] [--chunk-bytes 16384] [--broker URL]
        [--fetch 1GiB]

Prints one line of JSON when it serves: its node and its process id; FOLDER/held says when it held a share of a model.
From SIGUSR1 on it takes SLOWNESS_S longer for what it computes. Ends when its standard input does.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from edge_run.base.config import ModelConfig
from edge_run.base.units import parse_size
from edge_run.devices.members.identity import device_key
from edge_run.devices.mesh.opening import MeshConfig, known_cluster, open_mesh
from edge_run.devices.mesh.serving import serving
from edge_run.runtime.mesh.transport import LinkTransport
from edge_run.runtime.worker.worker import Worker

SLOWNESS_S = 0.15


def main() -> None:
    """Serve until nobody holds the other end of standard input any more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", type=Path, action="append", default=[])
    parser.add_argument("--name", default="worker")
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--broker")
    parser.add_argument("--listen", default="127.0.0.1")
    parser.add_argument("--chunk-bytes", type=int, default=2 << 20)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--fetch", type=parse_size, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    settings = MeshConfig(
        folder=arguments.folder,
        broker=arguments.broker,
        name=arguments.name,
        listen=(arguments.listen,),
        connect_s=60,  # a busy machine takes long
    )
    with serving(known_cluster(arguments.folder), device_key(arguments.folder)):
        mesh = open_mesh(settings)
        config = ModelConfig(memory=arguments.memory, cache_folder=arguments.cache, chunk_bytes=arguments.chunk_bytes)
        worker = Worker(mesh, arguments.models, config, arguments.fetch)
        worker.start()
        signal.signal(signal.SIGUSR1, lambda *_: become_slow())
        print(json.dumps({"node": mesh.node, "pid": os.getpid()}), flush=True)
        note_what_is_held(worker, arguments.folder / "held")
        worker.close()
        mesh.close()


def become_slow() -> None:
    """Be at work for longer before each activation is handed on."""
    send = LinkTransport.send

    def send_late(self: LinkTransport, *what: Any) -> None:
        time.sleep(SLOWNESS_S)
        send(self, *what)

    LinkTransport.send = send_late  # type: ignore[method-assign]


def note_what_is_held(worker: Worker, path: Path) -> None:
    """Write a line whenever the worker holds a share of a model, and whenever it does no more, until the end."""
    was_held = False
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        engine = worker._engine
        is_held = worker.status["epoch"] != 0 or (engine is not None and engine._assignment is not None)
        if is_held != was_held:
            was_held = is_held
            with path.open("a") as file:
                print(f"{time.monotonic():.3f} {int(is_held)}", file=file)


if __name__ == "__main__":
    main()
