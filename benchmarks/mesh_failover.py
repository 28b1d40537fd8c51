#!/usr/bin/env python3
"""How long an answer pauses when a device of the mesh is lost: killed, frozen, its cable cut, or the broker restarted.

    mesh_failover.py [--size 300M]

Four nodes, three of them in network namespaces on a bridge (root), each with room for what it holds; a prompt of
70 tokens and 24 greedy tokens, the fault at the tenth. Told apart: until the loss is said, until the new plan is said,
until the next token; the last is held against what is said beforehand that computing all again will take.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _box import ROOT, grown_model, write_results
from _mesh_box import need_mesh

sys.path.insert(0, str(ROOT / "tests"))

from namespaces import Network, network, run

os.environ["OMP_WAIT_POLICY"] = "passive"  # four processes share two cores
NAMES = ("n1", "n2", "n3")
TOKENS, MOMENT = 24, 10


def in_equal_parts(works: Sequence[Any], specs: Sequence[Any], hops: Any) -> Any:
    """Return a plan in which each device has as many layers in a row."""
    from edge_run.partition.mesh_plan import MeshPlan

    names, n = [spec.node for spec in specs], len(works) - 2
    owners = [names[i * len(names) // n] for i in range(n)]
    return MeshPlan((names[0], *owners, names[0]), 1, 0.1, {})


def greedy(engine: Any, at: Callable[[int], None] = lambda i: None) -> tuple[list[int], list[float]]:
    """Return the tokens, and when each was there."""
    from edge_run.runtime.decoding.session import Session

    session = Session(engine.front)
    logits, _ = session.feed([(7 * i * i + 3) % 200 + 1 for i in range(70)])
    tokens, times = [], []
    for i in range(TOKENS):
        at(i)
        tokens.append(int(logits.argmax()))
        logits = session.step(tokens[-1])
        times.append(time.monotonic())
    return tokens, times


def measure(model: Path, fault: str, wanted: list[int], net: Network) -> dict[str, Any]:
    """Return how long things took when `fault` struck."""
    from edge_run.base.config import ModelConfig
    from edge_run.devices.mesh.opening import MeshConfig, open_mesh
    from edge_run.runtime.mesh import coordinator
    from edge_run.runtime.mesh.engine import MeshOptions, open_mesh_engine
    from mesh_processes import MeshOfProcesses

    coordinator.plan_ring = in_equal_parts
    budget = "500MiB"
    said: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        mesh = MeshOfProcesses(Path(folder), model, net.here)
        try:
            for name, address in net.addresses.items():
                mesh.spawn(name, budget, net.wrap(name), 2 << 20, folder, address)
            for worker in mesh.workers.values():
                worker.wait_ready()
            here = open_mesh(MeshConfig(mesh.prepare_folder(Path(folder) / "here"), name="here", listen=(net.here,)))
            mesh.wait_for(here, len(NAMES))
            config = ModelConfig(
                memory=budget, context_tokens=256, micro_batch_tokens=32, threads=2, cache_folder=Path(folder)
            )
            engine = open_mesh_engine(
                model, config, here, MeshOptions(say=lambda text: said.append((time.monotonic(), text)))
            )
            struck = 0.0

            def at(i: int) -> None:
                nonlocal struck
                if i == MOMENT:
                    struck = time.monotonic()
                    {
                        "kill -9": lambda: os.kill(mesh.workers["n2"].pid, 9),
                        "SIGSTOP": lambda: os.kill(mesh.workers["n2"].pid, 19),
                        "cable cut": lambda: run("ip", "link", "set", net.space("n2"), "down"),
                        "broker restart": lambda: (mesh.broker.stop(), mesh.broker.start()),
                        "broker away, kill -9": lambda: (mesh.broker.stop(), os.kill(mesh.workers["n2"].pid, 9)),
                    }[fault]()

            try:
                tokens, times = greedy(engine, at)
                usual = (times[MOMENT - 1] - times[0]) / (MOMENT - 1)
            finally:
                engine.close()
                here.close()
                run("ip", "link", "set", net.space("n2"), "up")
                if fault == "SIGSTOP":
                    os.kill(mesh.workers["n2"].pid, 18)
        finally:
            mesh.close()
    after = [(moment - struck, text) for moment, text in said if moment > struck]
    lost = next((seconds for seconds, text in after if "lost" in text), 0.0)
    planned, promised = next(
        ((s, float(found[1])) for s, text in after if (found := re.search(r"about ([\d.]+) s", text))), (0.0, 0.0)
    )
    return {
        "fault": fault,
        "identical": tokens == wanted,
        "usual_token_s": round(usual, 3),
        "lost_after_s": round(lost, 2),
        "new_plan_after_s": round(planned, 2),
        "promised_replay_s": promised,
        "text_after_s": round(times[MOMENT] - struck, 2),
        "replay_s": round(times[MOMENT] - struck - planned, 2) if planned else 0.0,
    }


def main() -> None:
    """Measure and write the results."""
    from edge_run.base.config import ModelConfig
    from edge_run.runtime.engine.engine import Engine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="300M")
    arguments = parser.parse_args()
    need_mesh(in_networks=True)
    model = grown_model(arguments.size, 32)
    config = ModelConfig(memory="8GiB", context_tokens=256, micro_batch_tokens=32, threads=2)
    alone = Engine.open(model, config)
    wanted, _ = greedy(alone)
    alone.close()
    rows = []
    with network(NAMES) as net:
        for fault in ("kill -9", "SIGSTOP", "cable cut", "broker restart", "broker away, kill -9"):
            rows.append(measure(model, fault, wanted, net))
            print(rows[-1], file=sys.stderr)
    losses = [row for row in rows if row["lost_after_s"]]
    write_results(
        "mesh-failover",
        rows,
        f"{model.name} on four nodes (three in network namespaces), as many layers on each. A loss is said after at "
        f"most {max(row['lost_after_s'] for row in losses):.1f} s, the new plan after "
        f"{max(row['new_plan_after_s'] for row in losses):.1f} s; computing again what was said took "
        + ", ".join(f"{row['replay_s']} s where {row['promised_replay_s']} s were promised" for row in losses)
        + f". Tokens identical to those of one device: {all(row['identical'] for row in rows)}.",
    )


if __name__ == "__main__":
    main()
