"""A worker that becomes slow under an answer: a new plan must be made in the middle of it, and change no token.

    python mesh_replan.py MODEL.gguf [--tokens 300]

Of two workers the one that computes most takes much longer for each token from a moment on, as a device does that has
something else to do; not before what was guessed of both was put right. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_run.base.config import ModelConfig
from edge_run.base.mesh import MeshOptions
from edge_run.base.mesh_status import MeshUse
from edge_run.partition.mesh_plan import DeviceSpec, MeshPlan, UnitWork
from edge_run.partition.mesh_ring import Hops, plan_ring
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.mesh import coordinator
from edge_run.runtime.mesh.engine import open_mesh_engine
from mesh_faults import OPTIONS, greedy
from mesh_processes import mesh_of
from program import MESH, fork_from_here

MOMENT = 60  # tokens before it


def with_little_room_here(works: Sequence[UnitWork], specs: Sequence[DeviceSpec], hops: Hops) -> MeshPlan | None:
    """Return the real plan, where this device has no room for layers, so that they go to the others."""
    here, *others = specs
    ends = works[0].weight_bytes + works[-1].weight_bytes
    return plan_ring(works, [replace(here, memory_bytes=ends, range_bytes=0), *others], hops)


def run(path: Path, tokens: int) -> dict[str, Any]:
    """Answer, and slow the worker that has most layers from a moment on."""
    coordinator.plan_ring = with_little_room_here
    config = ModelConfig(memory="4GiB", **{**OPTIONS, "context_tokens": 512})
    alone = Engine.open(path, config)
    wanted, _ = greedy(alone, tokens)
    alone.close()
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder, mesh_of(Path(folder), path, list("bc")) as mesh:
        here = mesh.join()
        mesh.wait_for(here, 2)
        engine = open_mesh_engine(path, replace(config, chunk_bytes=16384), here, MeshOptions(say=said.append))
        seen: list[MeshUse] = []

        def at(i: int) -> None:
            if i == MOMENT:
                use = engine.mesh_use
                assert use is not None
                seen.append(use)
                mesh.workers[busiest(use)].become_slow()

        try:
            found, _ = greedy(engine, tokens, at)
            after = engine.mesh_use
        finally:
            engine.close()
    assert after is not None
    (before,) = seen
    return {
        "identical": found == wanted,
        "new_plans": after.recoveries - before.recoveries,
        "from": busiest(before),
        "to": busiest(after),
        "left_out": after.left_out,
        "said": said,
    }


def busiest(use: MeshUse) -> str:
    """Return the name of the device with most layers."""
    return max(use.nodes, key=lambda node: len(node.blocks)).name


def main() -> None:
    """Run once, and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=300)
    arguments = parser.parse_args()
    fork_from_here(MESH)
    print(json.dumps(run(arguments.model, arguments.tokens)))


if __name__ == "__main__":
    sys.exit(main())
