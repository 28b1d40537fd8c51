#!/usr/bin/env python3
"""Tokens/s of a dense model over 1, 2 and 4 nodes, each with a throttled disk and a budget of a quarter of the model.

    mesh_speed.py [--mbps 500] [--size 2G] [--layers 64] [--micro-batch 32] [--threads 2] [--starts 5]

All nodes are processes on one machine, each in a box with a disk speed of its own; they take turns computing, on the
same cores. With fewer threads than there are cores, the others read and do all else, for all nodes: as with devices
that have cores for both; otherwise reading takes from computing what it would not take on other devices. (Left to the
kernel, what computes goes from core to core with each turn, which cost 5 to 8 % here.) Resident: the whole model
in memory, one process. What is predicted comes from a probe in such a box, a new one before each start. Another run
gives each of four nodes a third of the model, so that all of it fits. A grown model is wide, and what llama.cpp
computes in is as wide: for each token of a micro-batch some 3 MB of each budget of a 4 GB model.

Four nodes and the model in memory are there at once and take turns, some tokens each, since the speed of a machine that
others use too changes within seconds; their ratio is that of all tokens of both. (Where there is no room for both, they
run one after the other.) What the four take of the cores while the other computes (heartbeats) is measured, and counted
against them. In a third turn the model in memory runs while four processes that do nothing else read as many bytes for
each token as the four nodes did: what reading alone takes of such a machine, whoever does it.

In a virtual machine a process may compute up to 25 % slower for its life than another start of it, and random reads in
parts of its memory take twice as long: memory that was freed goes back to the host, which probably gives it again in
smaller pages. So both are started several times, now the one first and now the other, and what counts is the median
over the starts.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import psutil
from _box import grown_model, write_results
from _mesh_box import PlainReading, Stepping, box, cores_besides, keep_apart, need_mesh, run
from _usage import peak_bytes

TOKENS = {1: 4, 2: 7}
TURN_TOKENS = 4
RESIDENT = 0
QUARTER, THIRD = "a quarter of it", "a third of it, so that all fits"

Rows: TypeAlias = list[dict[str, Any]]


class Nodes:
    """`n` nodes with a budget of `memory` bytes each, or the model in memory: a coordinator that can be asked."""

    def __init__(self, folder: Path, model: Path, n: int, memory: int, mbps: float, flags: list[str]) -> None:
        """Start them; flags begin with the cache."""
        from mesh_processes import MeshOfProcesses

        self._exit = contextlib.ExitStack()
        self._workers: list[Any] = []
        self.n, self.memory, self._threads = n, memory, threads_of(flags)
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

    def warm_up(self, n_tokens: int) -> None:
        """Make `n_tokens` tokens that do not count; from then on, what computes has cores of its own, if there are."""
        self._run.step(n_tokens)
        keep_apart(self._processes, self._threads)

    def step(self, n_tokens: int) -> float:
        """Make `n_tokens` tokens; return the seconds of one, the mean."""
        found = self._run.step(n_tokens)
        self.seconds += found
        return statistics.mean(found)

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
        token_s = statistics.mean(self.seconds)
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


def threads_of(flags: list[str]) -> int:
    """Return how many threads compute."""
    return int(flags[flags.index("--threads") + 1])


@contextlib.contextmanager
def nodes(*arguments: Any) -> Iterator[Nodes]:
    """Have nodes for a block, in a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        found = Nodes(Path(folder), *arguments)
        try:
            yield found
        finally:
            found.close()


@contextlib.contextmanager
def probed(model: Path, mbps: float, micro_batch: int, threads: int) -> Iterator[list[str]]:
    """Yield flags of nodes that know what a probe in a box found now."""
    with tempfile.TemporaryDirectory() as cache:
        flags = ["--cache", cache, "--micro-batch", str(micro_batch), "--threads", str(threads)]
        run(Path(cache), model, ["--probe", *flags], mbps)
        yield flags


class Start(NamedTuple):
    """What came of one start: how many times as fast as resident four nodes were, and resident beside plain reading.

    Of all tokens of its turns. idle_share: what the four took of the cores while the other computed. token_mb: what all
    of them read for a token.
    """

    ratio: float
    beside_reading: float = 0.0
    idle_share: float = 0.0
    token_mb: float = 0.0

    @property
    def net(self) -> float:
        """The ratio, less what the four took while the other computed."""
        return self.ratio * (1 - self.idle_share)


def by_turns(resident: Nodes, four: Nodes, reading: PlainReading | None, n_turns: int) -> Start:
    """Have both and plain reading take turns."""
    idle_cpu_s = token_bytes = 0.0
    seconds: dict[str, list[float]] = {"resident": [], "four": [], "beside": []}
    resident.warm_up(2)
    four.warm_up(2)
    for _ in range(n_turns):
        before = four.cpu_s
        seconds["resident"].append(resident.step(TURN_TOKENS))
        idle_cpu_s += four.cpu_s - before
        read = four.read_bytes
        seconds["four"].append(four.step(TURN_TOKENS))
        token_bytes = (four.read_bytes - read) / TURN_TOKENS
        if reading:
            with reading.at(token_bytes / seconds["resident"][-1]):
                seconds["beside"].append(resident.step(TURN_TOKENS))
            del resident.seconds[-TURN_TOKENS:]
        print({what: round(found[-1], 3) for what, found in seconds.items() if found}, file=sys.stderr)
    resident_s = sum(seconds["resident"])
    ratio, beside = (resident_s / sum(seconds[what]) if seconds[what] else 0.0 for what in ("four", "beside"))
    idle_share = idle_cpu_s / (resident_s * TURN_TOKENS) / (psutil.cpu_count() or 1)
    return Start(ratio, beside, idle_share, token_bytes / 1e6)


def both(model: Path, flags: list[str], mbps: float, first: int, n_turns: int) -> tuple[dict[str, Start], Rows]:
    """Have the model in memory and four nodes there at once, `first` the one or the other; return what came of it."""
    size = model.stat().st_size
    with contextlib.ExitStack() as stack:
        found: dict[int, Nodes] = {}
        for n in sorted((RESIDENT, 4), reverse=first == 4):
            found[n] = stack.enter_context(nodes(model, n, size // 4 if n else 0, mbps, flags))
            found[n].warm_up(1)
        resident, four = found[RESIDENT], found[4]
        with contextlib.closing(PlainReading(model, 4, mbps, cores_besides(threads_of(flags)))) as reading:
            starts = {QUARTER: by_turns(resident, four, reading, n_turns)}
        rows = [four.finish()]
        four.close()
        four = stack.enter_context(nodes(model, 4, size // 3, mbps, flags))
        starts[THIRD] = by_turns(resident, four, None, n_turns)
        return starts, [resident.finish(), *rows, four.finish()]


def one_after_the_other(
    model: Path, flags: list[str], mbps: float, first: int, n_turns: int
) -> tuple[dict[str, Start], Rows]:
    """Do the same where there is no room for both at once, with budgets of a quarter."""
    rows: dict[int, dict[str, Any]] = {}
    for n in sorted((RESIDENT, 4), reverse=first == 4):
        with nodes(model, n, model.stat().st_size // 4 if n else 0, mbps, flags) as found:
            found.warm_up(2)
            found.step(n_turns * TURN_TOKENS)
            rows[n] = found.finish()
    ratio = rows[4]["tokens_per_s"] / rows[RESIDENT]["tokens_per_s"]
    print(f"{ratio:.3f} ({rows[RESIDENT]['tokens_per_s']} tokens/s resident)", file=sys.stderr)
    return {QUARTER: Start(ratio)}, [rows[RESIDENT], rows[4]]


def in_words(starts: Sequence[Start]) -> str:
    """Return what four nodes have of resident's tokens/s."""

    def median(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.3f}, the median of {', '.join(f'{one:.2f}' for one in sorted(values))}"

    text = median([start.net for start in starts])
    if starts[0].idle_share:
        idle = statistics.median(start.idle_share for start in starts)
        text += f", less what the four took of the cores while the other computed, {100 * idle:.1f} %"
    if starts[0].beside_reading:
        text += (
            f"; beside processes that read as many bytes a token ({starts[0].token_mb:.0f} MB) and do nothing else the "
            f"model in memory keeps {median([start.beside_reading for start in starts])}"
        )
    return text


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbps", type=float, default=500)
    parser.add_argument("--size", default="2G")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--turns", type=int, default=4, help="of each start")
    parser.add_argument("--only-four", action="store_true", help="four nodes against resident, and no others")
    arguments = parser.parse_args()
    need_mesh()
    model, mbps = grown_model(arguments.size, arguments.layers), arguments.mbps
    size = model.stat().st_size
    has_room = 2.2 * size < psutil.virtual_memory().available
    rows: Rows = []
    found: dict[str, list[Start]] = {}
    for number in range(arguments.starts):
        with probed(model, mbps, arguments.micro_batch, arguments.threads) as flags:
            way = both if has_room else one_after_the_other
            starts, made = way(model, flags, mbps, (RESIDENT, 4)[number % 2], arguments.turns)
        rows += [{"start": number + 1, **row} for row in made]
        for budget, start in starts.items():
            found.setdefault(budget, []).append(start)
        print(*(f"{budget}: {start}" for budget, start in starts.items()), sep="\n", file=sys.stderr)
    for n in () if arguments.only_four else (1, 2):
        with (
            probed(model, mbps, arguments.micro_batch, arguments.threads) as flags,
            nodes(model, n, size // 4, mbps, flags) as few,
        ):
            few.warm_up(1)
            few.step(TOKENS[n])
            rows.append(few.finish())
        print(rows[-1], file=sys.stderr)
    wanted = max((row["tokens"] for row in rows), key=len)
    for row in rows:
        tokens = row.pop("tokens")
        row["identical"] = wanted[: len(tokens)] == tokens
    how = f"{arguments.turns} turns of {TURN_TOKENS} tokens each"
    write_results(
        f"mesh-speed-{arguments.size}-{arguments.threads}-threads",
        rows,
        f"{model.name}, micro-batches of {arguments.micro_batch}, {arguments.threads} threads, every node with a disk "
        f"of {mbps:.0f} MB/s and a budget for its whole process. {scaling(rows)}Four nodes against the model in "
        f"memory, in {arguments.starts} starts of {how}{'' if has_room else ', one after the other'}, have of its "
        f"tokens/s, with budgets of {'; with '.join(f'{budget}, {in_words(of)}' for budget, of in found.items())}. "
        f"Predicted against measured: {predictions(rows)}. All nodes take turns on {arguments.threads} of this "
        f"machine's {psutil.cpu_count()} cores. Tokens identical in all runs: {all(row['identical'] for row in rows)}.",
    )


def scaling(rows: Rows) -> str:
    """Return how many times one node's tokens/s more nodes have; nothing where one was not measured."""
    quarter = min(row["budget_bytes"] for row in rows if row["budget_bytes"])
    fitting = [row for row in rows if row["budget_bytes"] == quarter]
    speeds = {n: [row["tokens_per_s"] for row in fitting if row["nodes"] == n] for n in (1, 2, 4)}
    if not speeds[1]:
        return ""
    two, four = (statistics.median(speeds[n]) / speeds[1][0] for n in (2, 4))
    return (
        f"With budgets of a quarter of it two nodes give {two:.2f} times the tokens/s of one, four {four:.2f} times "
        f"(one run of {TOKENS[1]} tokens with one node and one of {TOKENS[2]} with two, after all starts). "
    )


def predictions(rows: Rows) -> str:
    """Return how far off predictions were, each from a probe of its own, by number of nodes and budget."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        if row["predicted_tokens_per_s"]:
            kind = f"{row['nodes']} nodes of {row['budget_bytes'] / 1e9:.1f} GB"
            error = float(row["predicted_tokens_per_s"]) / float(row["tokens_per_s"]) - 1
            errors.setdefault(kind, []).append(100 * error)
    return "; ".join(
        f"{kind} {statistics.median(found):+.0f} %, the median of {', '.join(f'{one:+.0f}' for one in sorted(found))}"
        for kind, found in errors.items()
    )


if __name__ == "__main__":
    main()
