#!/usr/bin/env python3
"""Random faults under answers, on a mesh of real processes and a real broker: are they those of one device?

    mesh_faults.py [--schedules 200] [--rows FILE [--now 25]] [--jobs 3]

Each device has a network of its own (root). Workers are killed, frozen, thawed, started again and unplugged; links are
cut, both ways and one way, and slowed down; the broker is stopped and restarted, and in every fourth schedule lost with
the worker whose program it is; in a third of all, the coordinator is killed, frozen or unplugged, at times with the
broker, and another process makes the answer with the workers. One to three faults an answer of 60 tokens, on tiny
models of random weights (dense, mixture of experts, recurrent, one that scales its input).
rows: what came is kept there as it comes, and what is there already is not run again. now: how many to run at most.
jobs: how many meshes at once; most of a schedule is waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _box import ROOT, write_results
from _mesh_box import need_mesh

sys.path.insert(0, str(ROOT / "tests"))

MODELS = ("granite", "qwen3moe", "mamba", "gemma3", "llama")
SCRIPT = ROOT / "tests" / "mesh_faults.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--now", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    need_mesh(in_networks=True)
    from tiny_models import make_model

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        kept = arguments.rows or Path(folder) / "rows"
        kept.touch()
        models = [str(make_model(name, Path(folder))) for name in MODELS]
        done = {row["seed"] for row in rows_of(kept)}
        left = [seed for seed in range(arguments.schedules) if seed not in done][: arguments.now]
        shares = [left[job :: arguments.jobs] for job in range(arguments.jobs)]
        for job in [pool.submit(run, share, models, kept) for share in shares]:
            job.result()
        rows = sorted(rows_of(kept), key=lambda row: int(row["seed"]))
    if len(rows) == arguments.schedules:
        write_results("mesh-faults", rows, finding(rows))
    else:
        print(f"{len(rows)} of {arguments.schedules} schedules are done", file=sys.stderr)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(seeds: Sequence[int], models: Sequence[str], kept: Path) -> None:
    """Run schedules, and keep what came; one that takes all with it has hung, and the others are run after it."""
    left = list(seeds)
    while left:
        command = [sys.executable, str(SCRIPT), *models, "--seeds", *map(str, left)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_WAIT_POLICY": "passive"}
        begun = None
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                row = json.loads(line)
                begun = row["seed"]
                if "outcome" in row:
                    begun = None
                    left.remove(row["seed"])
                    keep(row, kept)
        if left and begun is None:
            sys.exit(f"the schedules ended with {process.returncode}")
        if begun is not None:
            left.remove(begun)
            keep({"seed": begun, "outcome": "hung"}, kept)


def keep(row: dict[str, Any], kept: Path) -> None:
    row["told"] = "; ".join(row.get("told", ()))
    print(row, file=sys.stderr)
    with kept.open("a") as file:
        print(json.dumps(row), file=file)


def finding(rows: Sequence[dict[str, Any]]) -> str:
    """Return what the rows say."""
    right = sum(row.get("identical") is True for row in rows)
    hung = sum(str(row["outcome"]).startswith("hung") for row in rows)
    longest = [float(row["longest_token_s"]) for row in rows if "longest_token_s" in row]
    ended = [row for row in rows if "free_s" in row]
    used = sum(row["are_all_used"] is True for row in ended)
    return (
        f"Of {len(rows)} answers with one to three random faults each (a worker killed, frozen, frozen and thawed, "
        "started again or unplugged; a link cut, both ways or one way, or slowed down to 250 kbit/s; the broker "
        "stopped, restarted, or lost with the device that it runs on; the coordinator lost), "
        f"{right} have exactly the tokens of one undisturbed device; {hung} hung, "
        f"{len(rows) - right - hung} were lost or wrong. The longest token, with the detection of the loss, a new plan "
        f"and all computed again: {spread(longest)}.\n\n"
        f"In {len(ended)} of them the coordinator was killed, frozen or unplugged in the middle of its answer, at "
        "times together with the broker. Workers held nothing of it any more after "
        f"{spread(row['free_s'] for row in ended)}. "
        "Another process that wanted to lead at once did so after "
        f"{spread(row['lead_s'] for row in ended)} (counted from when there was a broker), and made the answer; in "
        f"{used} with all devices that could be reached. Coordinators that were thawed or plugged in meanwhile said "
        "that another leads, disturbed nobody, and ended with the same tokens.\n\n"
        "Five devices on one machine, at most three such meshes at a time, each device in a network namespace of its "
        "own, tiny models, layers dealt out in turn so that every device has a part. Links are slowed down by a token "
        "bucket, which delays too; this kernel has no netem."
    )


def spread(seconds: Any) -> str:
    """Return median and maximum in words."""
    values = sorted(seconds)
    return f"median {statistics.median(values):.2f} s, most {values[-1]:.2f} s" if values else "none"


if __name__ == "__main__":
    main()
