#!/usr/bin/env python3
"""Tokens/s of a dense model over 1, 2 and 4 nodes, each with a throttled disk and a budget of a quarter of the model.

    mesh_speed.py [--mbps 500] [--size 2G] [--layers 64] [--micro-batch 32] [--threads 2] [--rounds 10]

All nodes are processes on one machine, each in a box with a disk speed of its own; they take turns computing, with all
cores, as devices of a mesh do. Resident: the whole model in memory, one process. What is predicted comes from a probe
in such a box. Another run gives each of four nodes a third of the model, so that all of it fits. A grown model is wide,
and what llama.cpp computes in is as wide: for each token of a micro-batch some 3 MB of each budget of a 4 GB model.

Four nodes and the model in memory are there at once and take turns, some tokens each, since the speed of a machine that
others use too changes within minutes; their ratio is the median of all turns. (Where there is no room for both, they
run one after the other, as often as there are rounds.) What the four take of the cores while the
other computes (heartbeats) is measured, and counted against them. In a third turn the model in memory runs while four
processes that do nothing else read as many bytes for each token as the four nodes did: what reading alone takes of
such a machine, whoever does it.

In a virtual machine a process may compute up to 25 % slower for its life than another start of it, and random reads in
parts of its memory take twice as long: probably its host backs these in small pages. So a ratio is one of a pair of
starts; of another start it is another, and only several runs tell.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from _box import grown_model, write_results
from _mesh_box import PlainReading, Stepping, box, peak_bytes, run

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
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)

    @property
    def read_bytes(self) -> int:
        """What all its processes read from their disks so far."""
        return sum(process.io_counters().read_bytes for process in self._processes)

    @property
    def _processes(self) -> list[psutil.Process]:
        roots = [psutil.Process(pid) for pid in [self._run.pid, *(worker.pid for worker in self._workers)]]
        every = {process.pid: process for root in roots for process in [root, *root.children(recursive=True)]}
        return list(every.values())

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


class Turns(NamedTuple):
    """What came of turns: how many times as fast as resident four nodes were, and resident beside plain reading.

    idle_share: what the four took of the cores while the other computed.
    """

    ratios: Sequence[float]
    beside_reading: Sequence[float] = ()
    idle_share: float = 0.0

    @property
    def text(self) -> str:
        """In words: what four nodes have of resident's tokens/s."""
        ratio, beside = statistics.median(self.ratios), ""
        if self.beside_reading:
            beside = (
                "; beside processes that read as many bytes a token and do nothing else, the model in memory keeps "
                f"{statistics.median(self.beside_reading):.3f}, the median of "
                f"{', '.join(f'{one:.2f}' for one in sorted(self.beside_reading))}"
            )
        return (
            f"{ratio * (1 - self.idle_share):.3f}: {ratio:.3f}, the median of "
            f"{', '.join(f'{one:.2f}' for one in sorted(self.ratios))}, less {100 * self.idle_share:.1f} % that the "
            f"four took of the cores while the other computed{beside}"
        )


def by_turns(resident: Nodes, four: Nodes, reading: PlainReading | None, n_turns: int) -> Turns:
    """Have both and plain reading take turns."""
    ratios: list[float] = []
    beside: list[float] = []
    idle_cpu_s = others_s = 0.0
    resident.step(2)
    four.step(2)
    for _ in range(n_turns):
        before = four.cpu_s
        resident_s = resident.step(TURN_TOKENS)
        idle_cpu_s += four.cpu_s - before
        others_s += sum(resident.seconds[-TURN_TOKENS:])
        read = four.read_bytes
        ratios.append(resident_s / four.step(TURN_TOKENS))
        token_bytes = (four.read_bytes - read) / TURN_TOKENS
        if reading:
            with reading.at(token_bytes / resident_s):
                beside.append(resident_s / resident.step(TURN_TOKENS))
            del resident.seconds[-TURN_TOKENS:]
        print(f"{ratios[-1]:.3f} ({1 / resident_s:.3f} tokens/s resident)", *beside[-1:], file=sys.stderr)
    return Turns(ratios, beside, idle_cpu_s / others_s / (psutil.cpu_count() or 1))


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
    third, mbps = quarter * 4 // 3, arguments.mbps
    rows: list[dict[str, Any]] = []
    found: dict[str, Turns] = {}
    with tempfile.TemporaryDirectory() as cache:
        flags = ["--cache", cache, "--micro-batch", str(arguments.micro_batch), "--threads", str(arguments.threads)]
        run(Path(cache), model, ["--probe", *flags], mbps)
        if 2.2 * model.stat().st_size > psutil.virtual_memory().available:
            how = f"in pairs of runs, {2 * TURN_TOKENS} tokens each"
            ratios, rows = one_after_the_other(model, quarter, mbps, flags, arguments.rounds)
            found["a quarter of it"] = Turns(ratios)
        else:
            how = f"in {arguments.rounds} turns of {TURN_TOKENS} tokens each"
            with nodes(model, RESIDENT, 0, mbps, flags) as resident:
                with (
                    nodes(model, 4, quarter, mbps, flags) as four,
                    contextlib.closing(PlainReading(model, 4, mbps)) as reading,
                ):
                    found["a quarter of it"] = by_turns(resident, four, reading, arguments.rounds)
                    rows.append(four.finish())
                with nodes(model, 4, third, mbps, flags) as four:
                    found["a third of it, so that all fits"] = by_turns(resident, four, None, arguments.rounds)
                    rows.append(four.finish())
                rows.insert(0, resident.finish())
        for n in () if arguments.only_four else (1, 2):
            with nodes(model, n, quarter, mbps, flags) as few:
                few.step(TOKENS[n])
                rows.append(few.finish())
            print(rows[-1], file=sys.stderr)
    wanted = rows[0]["tokens"]
    for row in rows:
        tokens = row.pop("tokens")
        same = min(len(wanted), len(tokens))
        row["identical"] = wanted[:same] == tokens[:same]
    write_results(
        f"mesh-speed-{arguments.size}-{arguments.threads}-threads",
        rows,
        f"{model.name}, micro-batches of {arguments.micro_batch}, {arguments.threads} threads, every node with a disk "
        f"of {mbps:.0f} MB/s and a budget for its whole process. {scaling(rows)}Four nodes against the model in "
        f"memory, {how}, have of its tokens/s, with budgets of "
        f"{'; with '.join(f'{budget}, {turns.text}' for budget, turns in found.items())}. Predicted against measured: "
        f"within {100 * worst_error(rows):.0f} %. All nodes share this machine's cores, and take turns. Tokens "
        f"identical in all runs: {all(row['identical'] for row in rows)}.",
    )


def scaling(rows: Sequence[dict[str, Any]]) -> str:
    """Return how many times one node's tokens/s more nodes have; nothing where one was not measured."""
    speeds = {row["nodes"]: float(row["tokens_per_s"]) for row in reversed(rows)}
    if 1 not in speeds:
        return ""
    return (
        f"With budgets of a quarter of it two nodes give {speeds[2] / speeds[1]:.2f} times the tokens/s of one, four "
        f"{speeds[4] / speeds[1]:.2f} times. "
    )


def worst_error(rows: Sequence[dict[str, Any]]) -> float:
    """Return how far off predictions were at most, as a share of what was measured."""
    told = [row for row in rows if row["predicted_tokens_per_s"]]
    return max(abs(float(row["predicted_tokens_per_s"]) / float(row["tokens_per_s"]) - 1) for row in told)


if __name__ == "__main__":
    main()
