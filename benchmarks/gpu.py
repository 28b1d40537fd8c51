"""Logits with a part of the model on a GPU, resident and streamed, against llama.cpp in memory with the same part.

Per model: a prompt of 50 tokens in passes of 32, and 6 decoded tokens; at four budgets of the GPU's memory from the
smallest that works to all of the model, each with the rest in memory and with the rest streamed in the smallest
budget that works. A model counts as exact when every logit of every run is equal bit for bit. Models are tiny random
ones; architectures may be named as arguments. Speed is not measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _box import ROOT, write_results

sys.path.insert(0, str(ROOT / "tests"))
WORKER = ROOT / "benchmarks" / "_gpu_worker.py"
ARCHITECTURES = ("llama", "qwen3", "gemma3", "phi3", "qwen3moe", "gpt-oss", "deepseek2", "mamba", "jamba", "falcon-h1")
STEPS = 4


def compare(path: Path) -> list[dict[str, object]]:
    """Return the figures of each run of one model, from a child process."""
    done = subprocess.run(
        [sys.executable, str(WORKER), str(path), str(STEPS)], capture_output=True, text=True, check=False
    )
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode != 0:
        said = " ".join(done.stderr.strip().splitlines()[-1:])
        runs.append({"failure": f"signal {-done.returncode}" if done.returncode < 0 else said})
    return runs


def main() -> None:
    """Measure and write the results."""
    from tiny_models import make_model

    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or ARCHITECTURES:
            for run in compare(make_model(name, Path(folder))):
                rows.append({"model": name, **run})
                print(rows[-1], flush=True)
    names = sorted({str(row["model"]) for row in rows})
    exact = [n for n in names if all(row.get("different") == 0 for row in rows if row["model"] == n)]
    within = sum(int(str(row["gpu_taken"])) <= int(str(row["gpu_budget"])) for row in rows if "gpu_taken" in row)
    gpus = sorted({str(row["gpu"]) for row in rows if "gpu" in row})
    others = ", ".join(sorted(set(names) - set(exact))) or "none"
    finding = (
        f"{__doc__}\n* GPU: {', '.join(gpus)}.\n* Bit-identical: {len(exact)} of {len(names)} models, "
        f"{len(rows)} runs, {sum(row.get('mode') == 'streamed' for row in rows)} of them streamed. Others: {others}.\n"
        f"* Within the budget of the GPU's memory: {within} of {len(rows)} runs."
    )
    fields = ("model", "layers", "narrow", "gpu_budget", "gpu_taken", "mode", "by_expert", "streamed_bytes")
    fields = (*fields, "different", "failure")
    write_results("gpu", [{field: row.get(field, "") for field in fields} for row in rows], finding)


if __name__ == "__main__":
    main()
