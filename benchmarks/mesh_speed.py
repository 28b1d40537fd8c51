#!/usr/bin/env python3
"""Tokens/s of a dense model over 1, 2 and 4 nodes, each with a throttled disk and a budget of a quarter of the model.

    mesh_speed.py [--mbps 500] [--size 2G] [--micro-batch 32]

All nodes are processes on one machine, each in a box with a disk speed of its own; they take turns computing, with all
cores, as devices of a mesh do. Resident: the whole model in memory, one process. What is predicted comes from a probe
in such a box. A fifth run gives each of four nodes a third of the model, so that all of it fits. A grown model is wide,
and what llama.cpp computes in is as wide: for each token of a micro-batch some 3 MB of each budget of a 4 GB model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _box import grown_model, write_results
from _mesh_box import box, peak_bytes, run

TOKENS = {0: 16, 1: 5, 2: 8, 4: 16}


def measure(model: Path, nodes: int, memory: int, mbps: float, flags: list[str]) -> dict[str, Any]:
    """Return the figures of one run; flags begin with the cache."""
    from mesh_processes import MeshOfProcesses

    cache, flags = flags[1], [*flags, "--tokens", str(TOKENS[nodes])]
    with tempfile.TemporaryDirectory() as folder:
        if nodes <= 1:
            budget = ["--memory", str(memory)] if nodes else []
            return {**run(Path(folder), model, [*flags, *budget, "--alone"], mbps if nodes else None), "peaks": []}
        mesh = MeshOfProcesses(Path(folder), model)
        try:
            names = [f"w{i}" for i in range(nodes - 1)]
            for name in names:
                wrap = box(mbps, model)
                mesh.spawn(name, str(memory), wrap, 2 << 20, cache)
            for worker in mesh.workers.values():
                worker.wait_ready()
            here = Path(folder) / "here"
            mesh.prepare_folder(here)
            figures = run(here, model, [*flags, "--memory", str(memory), "--workers", str(nodes - 1)], mbps)
            figures["peaks"] = [peak_bytes(worker.pid) for worker in mesh.workers.values()]
            return figures
        finally:
            mesh.close()


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbps", type=float, default=500)
    parser.add_argument("--size", default="2G")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=32)
    arguments = parser.parse_args()
    model = grown_model(arguments.size, arguments.layers)
    quarter = model.stat().st_size // 4
    rows, wanted = [], None
    with tempfile.TemporaryDirectory() as cache:
        run(Path(cache), model, ["--probe", "--cache", cache], arguments.mbps)
        for nodes, memory in ((0, 0), (1, quarter), (2, quarter), (4, quarter), (4, quarter * 4 // 3)):
            flags = ["--cache", cache, "--micro-batch", str(arguments.micro_batch)]
            figures = measure(model, nodes, memory, arguments.mbps, flags)
            token_s = statistics.median(figures["seconds"][1:])
            wanted = wanted or figures["tokens"]
            same = min(len(wanted), len(figures["tokens"]))
            rows.append(
                {
                    "nodes": nodes or "resident",
                    "budget_bytes": memory,
                    "tokens_per_s": round(1 / token_s, 4),
                    "predicted_tokens_per_s": round(1 / p, 4) if (p := figures["predicted_token_s"]) else "",
                    "rounds": figures["rounds"],
                    "hop_ms": round(1e3 * figures["hop_s"], 3),
                    "layers": " ".join(f"{k}:{v}" for k, v in figures["layers"].items()),
                    "streamed_mb": " ".join(f"{v // 10**6}" for v in figures["streamed"].values()),
                    "peak_mb": " ".join(str(p // 10**6) for p in [figures["peak_bytes"], *figures["peaks"]]),
                    "identical": wanted[:same] == figures["tokens"][:same],
                    "recoveries": figures["recoveries"],
                }
            )
            print(rows[-1], file=sys.stderr)
    resident, one, two, four, fitting = (float(str(row["tokens_per_s"])) for row in rows)
    errors = [
        abs(float(str(row["predicted_tokens_per_s"])) / float(str(row["tokens_per_s"])) - 1)
        for row in rows
        if row["predicted_tokens_per_s"]
    ]
    write_results(
        "mesh-speed",
        rows,
        f"{model.name}, micro-batches of {arguments.micro_batch}, every node with a disk of {arguments.mbps:.0f} MB/s "
        f"and a budget of a quarter of the model for "
        f"its whole process: two nodes give {two / one:.2f} times the tokens/s of one, four {four / one:.2f} times, "
        f"which is {four / resident:.2f} of resident. With budgets of a third, where all fits, four give "
        f"{fitting / resident:.2f} of resident. Predicted against measured: within "
        f"{100 * max(errors):.0f} %. All nodes share this machine's cores, and take turns. Tokens identical in all "
        f"runs: {all(row['identical'] for row in rows)}.",
    )


if __name__ == "__main__":
    main()
