"""Many answers over a mesh of slow devices: the tokens a second of 8 answers against those of 1, in turns and at once.

    mesh_many.py MODEL [--nodes 4] [--cpus 0.5] [--sequences 8] [--rounds 3]

Each node is a process in a box with `--cpus` of this machine's processors, and computes layers that are all in its
memory, so that computing decides. One answer goes from device to device (`1, in turns`), and all in one pass do the
same (`8, in turns`): what they gain is what a kernel gains with several columns. With groups of answers in flight (`8,
at once`) devices compute at the same time. In another run a device is killed half way: its tokens must be the same.
Last, one device that holds the whole model makes 8 answers. The nodes together should have no more than this machine's
processors: 4 x 0.5 are two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from _box import file_at, need_box, run_json, spread, write_results
from _mesh_box import TIMEOUT_S, environment, need_mesh
from edgebox import boxed

from edge_run.base.units import parse_size

WORKER = Path(__file__).with_name("_mesh_many_worker.py")

WAYS: dict[str, Sequence[str]] = {
    "in turns": ("--turns",),
    "at once": (),
    "at once, one killed": ("--kill",),
    "one device": (),
}


def measure(model: Path, arguments: argparse.Namespace, cache: Path, sequences: int, way: str) -> dict[str, Any]:
    """Return what so many answers took."""
    from mesh_processes import MeshOfProcesses

    n_workers = 0 if way == "one device" else arguments.nodes - 1
    box = boxed([], cpus=arguments.cpus)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mesh = MeshOfProcesses(folder, model)
        try:
            for number in range(n_workers):
                mesh.spawn(f"w{number}", arguments.memory, box, 2 << 20, str(cache))
            for worker in mesh.workers.values():
                worker.wait_ready()
            here, watched = mesh.prepare_folder(folder / "here"), computing(mesh)
            command = [*box, sys.executable, str(WORKER), str(here), str(model), "--workers", str(n_workers)]
            command += ["--memory", arguments.memory, "--cache", str(cache), "--sequences", str(sequences)]
            command += ["--tokens", str(arguments.tokens), "--watch", *map(str, watched), *WAYS[way]]
            command += [*map(str, watched)] if "--kill" in command else []
            found, _ = run_json(command, timeout=TIMEOUT_S, env=environment())
        finally:
            mesh.close()
    return {"sequences": sequences, "way": way, **found}


def computing(mesh: Any) -> list[int]:
    """Return the processes in the boxes of a mesh's workers."""
    boxes = [psutil.Process(worker.process.pid) for worker in mesh.workers.values()]
    return [process.pid for one in boxes for process in one.children(recursive=True)]


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=file_at)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--cpus", type=float, default=0.5, help="of each node")
    parser.add_argument("--memory", default="1GiB", help="of each node")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="mesh-many")
    arguments = parser.parse_args()
    need_box(cpus=arguments.cpus)
    need_mesh()
    model, many = arguments.model, arguments.sequences
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        for number in range(arguments.rounds):
            runs = [(1, "in turns"), (many, "in turns"), (many, "at once"), (many, "at once, one killed")]
            runs += [(many, "one device")]
            found = [measure(model, arguments, Path(cache), *run) for run in runs]
            at_once, killed = found[2:4]
            held = max(row["peak_bytes"] for row in found)
            if held > parse_size(arguments.memory):
                raise SystemExit(f"a node held {held} bytes, more than {arguments.memory}")
            if killed["tokens"] != at_once["tokens"] or not killed["recoveries"]:
                raise SystemExit(f"a device was killed, and the tokens are not the same: {killed}, {at_once}")
            for row in found:
                tokens = sum(map(sum, row.pop("tokens"))) % 1_000_003  # the same in each round
                rows.append({"round": number, **row, "tokens": tokens})
                print(rows[-1], flush=True)
    write_results(arguments.name, rows, f"{(__doc__ or '').strip()}\n\n{table(rows)}")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the medians for a reader, with the least and the most; ratios are of medians."""
    lines = ["| answers | in flight | tokens/s | times one alone | tokens per CPU second | times one alone |"]
    lines += ["|---|---|---|---|---|---|"]
    alone: tuple[float, ...] = ()
    for sequences, way in dict.fromkeys((row["sequences"], row["way"]) for row in rows):
        same = [row for row in rows if (row["sequences"], row["way"]) == (sequences, way)]
        found = [[row[key] for row in same] for key in ("tokens_per_s", "tokens_per_cpu_s")]
        speeds = tuple(map(statistics.median, found))
        alone = alone or speeds
        columns = [f"{spread(all_of)} | {own / one:.2f}" for all_of, own, one in zip(found, speeds, alone, strict=True)]
        if "killed" in way:
            columns = ["the same tokens, computed again after that | | | "]
        lines.append(f"| {sequences}, {way} | {same[0]['most_in_flight']} | {' | '.join(columns)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
