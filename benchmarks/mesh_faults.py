#!/usr/bin/env python3
"""Random faults under answers, on a mesh of four real processes and a real broker: are they those of one device?

    mesh_faults.py [--schedules 50]

Workers are killed, frozen, frozen and thawed, started again; the broker is stopped, and restarted; one to three faults
an answer of 60 tokens, on tiny models of random weights (dense, mixture, recurrent, one that scales its input).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _box import ROOT, write_results

sys.path.insert(0, str(ROOT / "tests"))

MODELS = ("granite", "qwen3moe", "mamba", "gemma3", "llama")
TIMEOUT_S = 180


def main() -> None:
    from tiny_models import make_model

    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", type=int, default=50)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [make_model(name, Path(folder)) for name in MODELS]
        for seed in range(arguments.schedules):
            path = paths[seed % len(paths)]
            command = [sys.executable, str(ROOT / "tests" / "mesh_faults.py"), str(path), "--seed", str(seed)]
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_S,
                    check=False,
                    env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_WAIT_POLICY": "passive"},
                )
                if done.returncode:
                    row = {"seed": seed, "outcome": done.stderr.strip().splitlines()[-1][:200]}
                else:
                    row = {"outcome": "answered", **json.loads(done.stdout.splitlines()[-1])}
            except subprocess.TimeoutExpired:
                row = {"seed": seed, "outcome": "hung"}
            rows.append({"model": path.stem.split("-")[0], **row})
            print(rows[-1], file=sys.stderr)
    right = sum(row.get("identical") is True for row in rows)
    hung = sum(row["outcome"] == "hung" for row in rows)
    longest = max((float(str(row.get("longest_token_s", 0))) for row in rows), default=0.0)
    write_results(
        "mesh-faults",
        rows,
        f"Of {len(rows)} answers with one to three random faults each (a worker killed, frozen, frozen and thawed, or "
        f"started again; the broker stopped or restarted), {right} have exactly the tokens of one undisturbed device; "
        f"{hung} hung. The longest token, with the detection of the loss, a new plan and all computed again, took "
        f"{longest:.2f} s. Four processes on one machine, tiny models, layers dealt out in turn so that every device "
        "has a part.",
    )


if __name__ == "__main__":
    main()
