#!/usr/bin/env python3
"""Tokens/s of a dense model over 1, 2 and 4 nodes, each with a throttled disk and a budget of a quarter of the model.

    mesh_speed.py [--mbps 500] [--size 2G] [--layers 64] [--micro-batch 32] [--threads 2] [--rounds 10]

All nodes are processes on one machine, each in a box with a disk speed of its own; they take turns computing, with all
cores, as devices of a mesh do. Resident: the whole model in memory, one process. What is predicted comes from a probe
in such a box. A fifth run gives each of four nodes a third of the model, so that all of it fits. A grown model is wide,
and what llama.cpp computes in is as wide: for each token of a micro-batch some 3 MB of each budget of a 4 GB model.

Four nodes and the model in memory are there at once and take turns, some tokens each, since the speed of a machine that
others use too changes within minutes; their ratio is the median of all turns. (Where there is no room for both, they
run one after the other, as often as there are rounds.) What the four take of the cores while the
other computes (heartbeats) is measured, and counted against them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from _box import grown_model, write_results
from _mesh_box import Stepping, box, peak_bytes, run

TOKENS = {1: 5, 2: 8, 4: 16}
TURN_TOKENS = 4
RESIDENT = 0


class Nodes:
    """`n` nodes with a budget of `memory` bytes each, or the model in memory: a coordinator that can be asked."""

    def __init__(self, folder: Path, model: Path, n: int, memory: int, mbps: float, flags: list[str]) -> None:
        """Start them; flags begin with the cache."""
        from mesh_processes import MeshOfProcesses

        self._exit = contextlib.ExitStack()
        self._workers: list[Any] = []
        self.n, self.memory = n, memory
        if n <= 1:
            budget = ["--memory", str(memory)] if n else []
            self._run = Stepping(folder, model, [*flags, *budget, "--alone"], mbps if n else None)
        else:
            mesh = MeshOfProcesses(folder, model)
            self._exit.callback(mesh.close)
            for i in range(n - 1):
                mesh.spawn(f"w{i}", str(memory), box(mbps, model), 2 << 20, flags[1])
            self._workers = list(mesh.workers.values())
            for worker in self._workers:
                worker.wait_ready()
            here = mesh.prepare_folder(folder / "here")
            self._run = Stepping(here, model, [*flags, "--memory", str(memory), "--workers", str(n - 1)], mbps)
        self._exit.callback(self._run.close)
        self.seconds: list[float] = []

    def step(self, n_tokens: int) -> float:
        """Make `n_tokens` tokens; return the seconds of one, the median."""
        found = self._run.step(n_tokens)
        self.seconds += found
        return statistics.median(found)

    @property
    def cpu_s(self) -> float:
        """What all its processes took of the cores so far."""
        roots = [psutil.Process(pid) for pid in [self._run.pid, *(worker.pid for worker in self._workers)]]
        every = {process.pid: process for root in roots for process in [root, *root.children(recursive=True)]}
        return sum(sum(process.cpu_times()[:2]) for process in every.values())

    def finish(self) -> dict[str, Any]:
        """End it, and return its row."""
        figures = self._run.finish()
        peaks = [figures["peak_bytes"], *(peak_bytes(worker.pid) for worker in self._workers)]
        token_s = statistics.median(self.seconds[1:])
        return {
            "nodes": self.n or "resident",
            "budget_bytes": self.memory,
            "tokens_per_s": round(1 / token_s, 4),
            "predicted_tokens_per_s": round(1 / p, 4) if (p := figures["predicted_token_s"]) else "",
            "rounds": figures["rounds"],
            "hop_ms": round(1e3 * figures["hop_s"], 3),
            "layers": " ".join(f"{k}:{v}" for k, v in figures["layers"].items()),
            "streamed_mb": " ".join(f"{v // 10**6}" for v in figures["streamed"].values()),
            "peak_mb": " ".join(str(peak // 10**6) for peak in peaks),
            "tokens": figures["tokens"],
            "recoveries": figures["recoveries"],
        }

    def close(self) -> None:
        """End all processes."""
        self._exit.close()


@contextlib.contextmanager
def nodes(*arguments: Any) -> Iterator[Nodes]:
    """Have nodes for a block, in a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        found = Nodes(Path(folder), *arguments)
        try:
            yield found
        finally:
            found.close()


def by_turns(resident: Nodes, four: Nodes, n_turns: int) -> tuple[list[float], float]:
    """Return how many times as fast `four` is as `resident`, for each turn, and the cores' share it has in others'."""
    ratios, idle_cpu_s, others_s = [], 0.0, 0.0
    resident.step(2)
    four.step(2)
    for _ in range(n_turns):
        before = four.cpu_s
        resident_s = resident.step(TURN_TOKENS)
        idle_cpu_s += four.cpu_s - before
        others_s += sum(resident.seconds[-TURN_TOKENS:])
        ratios.append(resident_s / four.step(TURN_TOKENS))
        print(f"{ratios[-1]:.3f} ({1 / resident_s:.3f} tokens/s resident)", file=sys.stderr)
    return ratios, idle_cpu_s / others_s / (psutil.cpu_count() or 1)


def one_after_the_other(
    model: Path, quarter: int, mbps: float, flags: list[str], n_pairs: int
) -> tuple[list[float], list[dict[str, Any]]]:
    """Return the same ratios where there is no room for both at once, for pairs of runs; and the rows of the last."""
    ratios, rows = [], []
    for _ in range(n_pairs):
        rows = []
        for n, memory in ((RESIDENT, 0), (4, quarter)):
            with nodes(model, n, memory, mbps, flags) as found:
                found.step(2)
                found.step(2 * TURN_TOKENS)
                rows.append(found.finish())
        ratios.append(rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"])
        print(f"{ratios[-1]:.3f} ({rows[0]['tokens_per_s']} tokens/s resident)", file=sys.stderr)
    return ratios, rows


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbps", type=float, default=500)
    parser.add_argument("--size", default="2G")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only-four", action="store_true", help="four nodes against resident, and no others")
    arguments = parser.parse_args()
    model = grown_model(arguments.size, arguments.layers)
    quarter = model.stat().st_size // 4
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        flags = ["--cache", cache, "--micro-batch", str(arguments.micro_batch), "--threads", str(arguments.threads)]
        run(Path(cache), model, ["--probe", *flags], arguments.mbps)
        if 2.1 * model.stat().st_size > psutil.virtual_memory().available:
            what, idle_share = f"in pairs of runs, {2 * TURN_TOKENS} tokens each", 0.0
            ratios, rows = one_after_the_other(model, quarter, arguments.mbps, flags, arguments.rounds)
        else:
            what = f"in {arguments.rounds} turns of {TURN_TOKENS} tokens each"
            with (
                nodes(model, RESIDENT, 0, arguments.mbps, flags) as resident,
                nodes(model, 4, quarter, arguments.mbps, flags) as four,
            ):
                ratios, idle_share = by_turns(resident, four, arguments.rounds)
                rows = [resident.finish(), four.finish()]
        for n, memory in () if arguments.only_four else ((1, quarter), (2, quarter), (4, quarter * 4 // 3)):
            with nodes(model, n, memory, arguments.mbps, flags) as found:
                found.step(TOKENS[n])
                rows.append(found.finish())
            print(rows[-1], file=sys.stderr)
    wanted = rows[0]["tokens"]
    for row in rows:
        tokens = row.pop("tokens")
        same = min(len(wanted), len(tokens))
        row["identical"] = wanted[:same] == tokens[:same]
    speeds = [float(row["tokens_per_s"]) for row in rows]
    errors = [
        abs(float(row["predicted_tokens_per_s"]) / speed - 1)
        for row, speed in zip(rows, speeds, strict=True)
        if row["predicted_tokens_per_s"]
    ]
    ratio = statistics.median(ratios)
    scaling = (
        ""
        if arguments.only_four
        else f"Two nodes give {speeds[3] / speeds[2]:.2f} times the tokens/s of one, four {speeds[1] / speeds[2]:.2f} "
        f"times. With budgets of a third, where all fits, four give {speeds[4] / speeds[0]:.2f} of resident, in a run "
        "of its own. "
    )
    write_results(
        f"mesh-speed-{arguments.size}-{arguments.threads}-threads",
        rows,
        f"{model.name}, micro-batches of {arguments.micro_batch}, {arguments.threads} threads, every node with a disk "
        f"of {arguments.mbps:.0f} MB/s and a budget of a quarter of the model for its whole process. {scaling}Four "
        f"nodes against the model in memory, {what}: "
        f"{ratio * (1 - idle_share):.3f} of its tokens/s: {ratio:.3f}, the median of "
        f"{', '.join(f'{one:.2f}' for one in sorted(ratios))}, less {100 * idle_share:.1f} % that the four took of "
        f"the cores while the other computed. Predicted against measured: within {100 * max(errors):.0f} %. All nodes "
        "share this machine's cores, and take turns. Tokens identical in all runs: "
        f"{all(row['identical'] for row in rows)}.",
    )


if __name__ == "__main__":
    main()
