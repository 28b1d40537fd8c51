"""Many answers over a mesh of slow devices: the tokens a second of 8 sequences against those of 1.

    mesh_many.py MODEL [--nodes 4] [--cpus 0.5] [--sequences 1 2 4 8] [--rounds 3]

Each node is a process in a box with `--cpus` of this machine's processors, and computes as many layers as any other,
all in its memory, so that computing decides. Devices compute one after the other, each its layers of all sequences of a
pass: what many sequences gain is what a kernel gains with several columns, and what they save of handing on. If devices
worked on different groups of sequences at the same time (a pipeline), they would gain up to the number of nodes more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from _box import run_json, write_results
from _mesh_box import TIMEOUT_S, _environment
from edgebox import boxed

WORKER = Path(__file__).with_name("_mesh_many_worker.py")


def measure(model: Path, arguments: argparse.Namespace, sequences: int, cache: Path) -> dict[str, Any]:
    """Return what passes of so many sequences took."""
    from mesh_processes import MeshOfProcesses

    nodes = arguments.nodes
    box = boxed([], cpus=arguments.cpus)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mesh = MeshOfProcesses(folder, model)
        try:
            for number in range(nodes - 1):
                mesh.spawn(f"w{number}", arguments.memory, box, 2 << 20, str(cache))
            for worker in mesh.workers.values():
                worker.wait_ready()
            before = cpu_seconds(mesh)
            here = mesh.prepare_folder(folder / "here")
            command = [*box, sys.executable, str(WORKER), str(here), str(model), "--workers", str(nodes - 1)]
            command += ["--memory", arguments.memory, "--cache", str(cache), "--sequences", str(sequences)]
            found, _ = run_json([*command, "--passes", str(arguments.passes)], timeout=TIMEOUT_S, env=_environment())
            others_s = cpu_seconds(mesh) - before
        finally:
            mesh.close()
    seconds = found["seconds"][1:]
    return {
        "sequences": sequences,
        "pass_s": statistics.median(seconds),
        "tokens_per_s": sequences / statistics.median(seconds),
        "own_cpu_s": statistics.median(found["cpu_s"][1:]),
        "other_cpu_s": others_s,
        "layers": found["layers"],
        "hop_s": found["hop_s"],
        "tokens": found["tokens"],
    }


def cpu_seconds(mesh: Any) -> float:
    """Return the seconds that the workers of a mesh have computed."""
    found = 0.0
    for worker in mesh.workers.values():
        for process in (one := psutil.Process(worker.process.pid), *one.children(recursive=True)):
            times = process.cpu_times()
            found += times.user + times.system
    return found


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--cpus", type=float, default=0.5, help="of each node")
    parser.add_argument("--memory", default="1GiB", help="of each node")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--passes", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="mesh-many")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        for number in range(arguments.rounds):
            for sequences in arguments.sequences:
                row = {"round": number, **measure(arguments.model.resolve(), arguments, sequences, Path(cache))}
                row["tokens"] = sum(map(sum, row["tokens"])) % 1_000_003  # the same in each round
                rows.append(row)
                print(row, flush=True)
    write_results(arguments.name, rows, f"{(__doc__ or '').strip()}\n\n{table(rows)}")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the medians for a reader."""
    lines = ["| sequences | pass | tokens/s | times one alone |", "|---|---|---|---|"]
    alone = 0.0
    for sequences in dict.fromkeys(row["sequences"] for row in rows):
        same = [row for row in rows if row["sequences"] == sequences]
        pass_s, speed = (statistics.median(row[key] for row in same) for key in ("pass_s", "tokens_per_s"))
        alone = alone or speed / sequences * rows[0]["sequences"]
        lines.append(f"| {sequences} | {pass_s:.3f} s | {speed:.2f} | {speed / alone:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
