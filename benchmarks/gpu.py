"""Logits with a part of the model on a GPU, resident and streamed, against llama.cpp in memory with the same part.

Per model: a prompt of 50 tokens in passes of 32, and 6 decoded tokens; at three budgets of the GPU's memory from the
smallest that works to all of the model, each with the rest in memory and with the rest streamed in the smallest
budget that works, and each of these without and with op offload to the GPU. A model counts as exact when every logit
of every run is equal bit for bit. Models are tiny random ones; architectures may be named as arguments. Speed is not
measured.

Where a process ends in the middle, the same part is tried with llama-cpp-python alone, without anything of ours, and
the row says how that went. So is a mixture of experts whose experts have biases, all of it on the GPU: where the
processor plays the GPU, edge-run keeps such experts in memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _box import ROOT, need_gpu, write_results

sys.path.insert(0, str(ROOT / "tests"))
WORKER = ROOT / "benchmarks" / "_gpu_worker.py"
PLAIN = ROOT / "benchmarks" / "_plain_gpu_worker.py"
ARCHITECTURES = ("llama", "qwen3", "gemma3", "phi3", "qwen3moe", "gpt-oss", "deepseek2", "mamba", "jamba", "falcon-h1")
STEPS = 3


def compare(path: Path) -> list[dict[str, object]]:
    """Return the figures of each run of one model, from a child process."""
    done = subprocess.run(
        [sys.executable, str(WORKER), str(path), str(STEPS)], capture_output=True, text=True, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    runs = [line for line in lines if "part" not in line]
    if done.returncode != 0:
        said = " ".join(done.stderr.strip().splitlines()[-1:])
        part = next((line["part"] for line in reversed(lines) if "part" in line), None)
        if part is None:
            raise SystemExit(f"{path.name}: nothing was tried: {done.stderr[-3000:]}")
        failure = f"signal {-done.returncode}" if done.returncode < 0 else said
        shown = {"layers": part["layers"], "narrow": part["narrow"]}
        runs.append({**shown, "failure": failure, "llama.cpp alone": alone(path, part)})
    return runs


def alone(path: Path, part: dict[str, Any]) -> str:
    """Return how llama-cpp-python alone fares with a part of a model on the GPU."""
    command = [sys.executable, str(PLAIN), str(path), str(part["layers"]), *part["on_host"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"signal {-done.returncode}" if done.returncode < 0 else (done.stdout or done.stderr).strip()[-80:]


def main() -> None:
    """Measure and write the results."""
    from edge_run.partition.placement import has_biased_experts
    from edge_run.tiers.gguf import read_gguf
    from tiny_models import make_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=ARCHITECTURES)
    parser.add_argument("--jobs", type=int, default=1, help="models at once")
    arguments = parser.parse_args()
    need_gpu()
    rows: list[dict[str, object]] = []
    lone: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as jobs:
        paths = {name: make_model(name, Path(folder)) for name in arguments.models}
        for (name, path), runs in zip(paths.items(), jobs.map(compare, paths.values()), strict=True):
            for run in runs:
                rows.append({"model": name, **run})
                print(rows[-1], flush=True)
            if has_biased_experts(tensor.name for tensor in read_gguf(path).tensors):
                lone[name] = alone(path, {"layers": 999, "on_host": []})
                print(name, lone[name], flush=True)
    write_results("gpu", *findings(rows, lone))


def findings(rows: Sequence[dict[str, object]], lone: dict[str, str]) -> tuple[list[dict[str, object]], str]:
    """Return the table, and what follows from it; lone: models that were run without anything of ours."""
    names = sorted({str(row["model"]) for row in rows})
    exact = [n for n in names if all(row.get("different") == 0 for row in rows if row["model"] == n)]
    within = sum(int(str(row["gpu_taken"])) <= int(str(row["gpu_budget"])) for row in rows if "gpu_taken" in row)
    gpus = sorted({str(row["gpu"]) for row in rows if "gpu" in row})
    others = ", ".join(sorted(set(names) - set(exact))) or "none"
    ended = [row for row in rows if row.get("failure")]
    also = sum(str(row["llama.cpp alone"]).startswith("signal") for row in ended)
    alone_text = "; ".join(f"{name}: {said}" for name, said in lone.items()) or "none was tried"
    finding = (
        f"{__doc__}\n* GPU: {', '.join(gpus)}.\n* Bit-identical: {len(exact)} of {len(names)} models, "
        f"{len(rows)} runs, {sum(row.get('mode') == 'streamed' for row in rows)} of them streamed, "
        f"{sum(bool(row.get('copies')) for row in rows)} with op offload. Others: {others}.\n"
        f"* Processes that ended in the middle: {len(ended)}; llama-cpp-python alone ended so too in {also} of them.\n"
        f"* All of the model on the GPU, with llama-cpp-python alone, where experts have biases: {alone_text}.\n"
        f"* Within the budget of the GPU's memory: {within} of {len(rows)} runs."
    )
    fields = ("model", "layers", "narrow", "copies", "gpu_budget", "gpu_taken", "mode", "by_expert", "streamed_bytes")
    fields = (*fields, "different", "failure", "llama.cpp alone")
    table: list[dict[str, object]] = [{field: row.get(field, "") for field in fields} for row in rows]
    for name, said in lone.items():
        table.append(
            dict.fromkeys(fields, "") | {"model": f"{name}, no edge-run", "layers": "all", "llama.cpp alone": said}
        )
    return table, finding


if __name__ == "__main__":
    main()
