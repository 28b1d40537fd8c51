"""Many answers over a mesh of slow devices: the tokens a second of 8 sequences against those of 1.

    mesh_many.py MODEL [--nodes 4] [--cpus 0.5] [--sequences 1 2 4 8] [--rounds 3]

Each node is a process in a box with `--cpus` of this machine's processors, and computes as many layers as any other,
all in its memory, so that computing decides. Devices compute one after the other, each its layers of all sequences of a
pass: what many sequences gain is what a kernel gains with several columns, and what they save of handing on. If devices
worked on different groups of sequences at the same time (a pipeline), they would gain up to the number of nodes more.
On a machine that others use too, the CPU seconds of all nodes together say more: devices that take turns make as many
tokens a second as a CPU second makes, times `--cpus`.
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
            here = mesh.prepare_folder(folder / "here")
            command = [*box, sys.executable, str(WORKER), str(here), str(model), "--workers", str(nodes - 1)]
            command += ["--memory", arguments.memory, "--cache", str(cache), "--sequences", str(sequences)]
            command += ["--passes", str(arguments.passes), "--watch", *map(str, computing(mesh))]
            found, _ = run_json(command, timeout=TIMEOUT_S, env=_environment())
        finally:
            mesh.close()
    seconds = found["seconds"]
    return {
        "sequences": sequences,
        "pass_s": statistics.median(seconds),
        "tokens_per_s": sequences / statistics.median(seconds),
        "cpu_s": found["cpu_s"],
        "tokens_per_cpu_s": sequences / found["cpu_s"],
        "layers": found["layers"],
        "hop_s": found["hop_s"],
        "tokens": found["tokens"],
    }


def computing(mesh: Any) -> list[int]:
    """Return the processes in the boxes of a mesh's workers."""
    boxes = [psutil.Process(worker.process.pid) for worker in mesh.workers.values()]
    return [process.pid for one in boxes for process in one.children(recursive=True)]


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
    lines = ["| sequences | pass | tokens/s | times one alone | tokens per CPU second | times one alone |"]
    lines += ["|---|---|---|---|---|---|"]
    alone: tuple[float, ...] = ()
    for sequences in dict.fromkeys(row["sequences"] for row in rows):
        same = [row for row in rows if row["sequences"] == sequences]
        names = ("pass_s", "tokens_per_s", "tokens_per_cpu_s")
        pass_s, *speeds = (statistics.median(row[key] for row in same) for key in names)
        alone = alone or tuple(speeds)
        columns = [f"{speed:.2f} | {speed / one:.2f}" for speed, one in zip(speeds, alone, strict=True)]
        lines.append(f"| {sequences} | {pass_s:.3f} s | {' | '.join(columns)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
