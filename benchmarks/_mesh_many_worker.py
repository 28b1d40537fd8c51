"""The coordinator of many answers over a mesh, for `mesh_many.py`: prints one JSON line.

    _mesh_many_worker.py FOLDER MODEL --workers 3 --sequences 8 [--passes 12] [--cache DIR]

Each device computes as many layers as any other, whatever a plan would say. Each pass decodes a token of each sequence.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from _mesh_joining import joined

from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.partition.mesh_plan import DeviceSpec, MeshPlan, UnitWork
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.mesh import coordinator
from edge_run.runtime.mesh.engine import MeshOptions, open_mesh_engine

PROMPT, ROOM = 16, 64


def cpu_seconds(others: Sequence[int]) -> float:
    """Return the seconds that this process and others have computed."""
    times = [psutil.Process(process).cpu_times() for process in others]
    return time.process_time() + sum(one.user + one.system for one in times)


def evenly(works: Sequence[UnitWork], specs: Sequence[DeviceSpec], hop: object) -> MeshPlan:
    """Return a plan in which each device has as many units as any other; the first one has the last unit too."""
    nodes = [spec.node for spec in specs]
    inner = len(works) - 1
    owners = [nodes[number * len(nodes) // inner] for number in range(inner)]
    return MeshPlan((*owners, nodes[0]), 1, 0.0, {})


def main() -> None:
    """Run and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--workers", type=int, default=0, help="0: without a mesh")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--passes", type=int, default=12)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--watch", type=int, nargs="*", default=[], help="processes that compute too")
    arguments = parser.parse_args()
    n = arguments.sequences
    config = ModelConfig(
        memory=arguments.memory,
        context_tokens=n * (PROMPT + arguments.passes + ROOM),
        micro_batch_tokens=max(32, n),
        sequences=n,
        threads=1,
        cache_folder=arguments.cache,
    )
    mesh = None
    coordinator.plan_ring = evenly
    if arguments.workers:
        mesh = joined(arguments.folder, arguments.workers)
        engine = open_mesh_engine(arguments.model, config, mesh, MeshOptions(say=lambda text: None))
    else:
        engine = Engine.open(arguments.model, config)
    front = engine.front
    tokens = []
    for sequence in range(n):
        prompt = [(7 * i * i + 3 + sequence) % 200 + 1 for i in range(PROMPT)]
        rows = front.decode(
            [BatchToken(token, i, sequence, wants_logits=i == PROMPT - 1) for i, token in enumerate(prompt)]
        )
        tokens.append([int(rows[0].argmax())])
    seconds, cpu_before_s = [], 0.0
    for number in range(-1, arguments.passes - 1):  # the first one does not count
        if number == 0:
            cpu_before_s = cpu_seconds(arguments.watch)
        started = time.monotonic()
        rows = front.decode(
            [BatchToken(tokens[s][-1], PROMPT + 1 + number, s, wants_logits=True) for s in range(n)],
        )
        seconds.append(time.monotonic() - started)
        for s in range(n):
            tokens[s].append(int(rows[s].argmax()))
    use = engine.mesh_use
    figures = {
        "tokens": tokens,
        "seconds": seconds[1:],
        "cpu_s": (cpu_seconds(arguments.watch) - cpu_before_s) / (arguments.passes - 1),
        "layers": {node.name: len(node.blocks) for node in use.nodes} if use else {},
        "hop_s": use.hop_s if use else 0.0,
        "pid": os.getpid(),
    }
    print(json.dumps(figures), flush=True)
    engine.close()
    if mesh:
        mesh.close()


if __name__ == "__main__":
    main()
