"""A run over a mesh in a process of its own, which can be killed, frozen and cut off.

    python mesh_coordinator.py FOLDER MODEL.gguf [--tokens 60] [--workers 3] [--listen ADDRESS]

Prints a line of JSON for each token, for what it tells its user, and in the end for how the model was spread.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
import time
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.mesh import MeshOptions, is_worker
from edge_run.devices.mesh.opening import MeshConfig, open_mesh
from edge_run.runtime.mesh import coordinator, device_group
from edge_run.runtime.mesh.engine import open_mesh_engine
from mesh_faults import OPTIONS, greedy
from mesh_processes import CONNECT_S, LEAST_DEADLINE_S, START_S, round_robin


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    """Make one answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--listen", default="127.0.0.1")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    coordinator.plan_ring, device_group.LEAST_DEADLINE_S = round_robin, LEAST_DEADLINE_S
    with contextlib.ExitStack() as stack:
        mesh = open_mesh(MeshConfig(folder=arguments.folder, name="a", listen=(arguments.listen,), connect_s=CONNECT_S))
        stack.callback(mesh.close)
        until = time.monotonic() + START_S
        while sum(map(is_worker, mesh.members())) < arguments.workers and time.monotonic() < until:
            mesh.wait(timeout_s=0.05)
        config = ModelConfig(memory="4GiB", **OPTIONS)
        engine = open_mesh_engine(
            arguments.model,
            dataclasses.replace(config, chunk_bytes=16384),
            mesh,
            MeshOptions(say=lambda text: tell(say=text)),
        )
        stack.callback(engine.close)
        tell(token=0)  # as somebody who thinks about what to ask
        time.sleep(0.2)

        def at(i: int) -> None:
            tell(token=i + 1)
            time.sleep(0.02)

        said, longest = greedy(engine, arguments.tokens, at)
        use = engine.mesh_use
        assert use is not None
        tell(said=said, longest_s=longest, recoveries=use.recoveries, nodes=len(use.nodes))
    tell(ended=True)


if __name__ == "__main__":
    main()
