"""Both budgets, of the GPU's memory and of the machine's, at ten different pairs for each model: what is held at most.

Models: the kit model grown to 64 MB, and a tiny random mixture of experts. Five budgets of the GPU's memory from the
smallest that works to all of the model, each with the smallest budget of memory that works, and with half of the model
more. Each run is a process of its own: a prompt of 50 tokens in passes of 32, and 6 tokens; where weights stream,
passes of many tokens run on the GPU in every second pair. Reached when the process's highest resident size is within
one budget, and what llama.cpp allocated on the GPU within the other. Where the process ends in the middle,
llama-cpp-python is run alone with the same part of the model on the GPU: what it does not survive either is not
counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _box import KIT, ROOT, need_gpu, write_results

from gpu import alone

sys.path.insert(0, str(ROOT / "tests"))
WORKER = ROOT / "benchmarks" / "_gpu_budget_worker.py"
STEPS = 5


def measure(path: Path, gpu_bytes: int, memory_bytes: int, *flags: str) -> dict[str, Any]:
    """Return the figures of one run; none where its process was ended by a signal."""
    command = [sys.executable, str(WORKER), str(path), str(gpu_bytes), str(memory_bytes), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return {}
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nfailed with {done.returncode}:\n{done.stderr}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def pairs(path: Path, lost: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the figures of ten pairs; `lost` gets what llama.cpp does not survive."""
    from gpu_pairs import offloads

    for number, choice in enumerate(offloads(path, STEPS, op_offload=True)):
        flags = ["copies"] if number % 2 else []
        least = measure(path, choice.sizes.total_bytes, 0, *flags)
        if not least:
            placement = choice.placement
            part = {"layers": placement.n_layers, "on_host": placement.host_patterns}
            ended = alone(path, part)
            assert ended.startswith("signal"), f"edge-run ended in the middle, llama.cpp alone did not: {part}"
            lost.append(f"{path.stem}, {choice.sizes.total_bytes} bytes on the GPU: {ended}")
            continue
        yield least
        more = int(least["memory_budget"]) + path.stat().st_size // 2
        if not (roomy := measure(path, choice.sizes.total_bytes, more, *flags)):
            raise SystemExit(f"{path.stem}: with {more} bytes of memory the process ended in the middle")
        yield roomy


def main() -> None:
    """Measure and write the results."""
    from edge_run import inflate
    from edge_run.base.units import MIB
    from tiny_models import make_model

    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    need_gpu()
    rows: list[dict[str, Any]] = []
    lost: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        dense = Path(folder) / "kit.gguf"
        inflate(KIT, dense, 64 * MIB)
        for name, path in ("dense", dense), ("moe", make_model("qwen3moe", Path(folder))):
            for figures in pairs(path, lost):
                rows.append({"model": name, **figures})
                print(rows[-1], flush=True)
    within = [row["gpu_taken"] <= row["gpu_budget"] and row["memory_peak"] <= row["memory_budget"] for row in rows]
    worst_gpu = max(row["gpu_taken"] / row["gpu_budget"] for row in rows)
    worst = max(row["memory_peak"] / row["memory_budget"] for row in rows)
    finding = (
        f"{__doc__}\n* GPU: {', '.join(sorted({row['gpu'] for row in rows}))}. Where the processor plays it, its "
        "memory is the machine's, and counts in that budget too.\n"
        f"* Within both budgets: {sum(within)} of {len(rows)} pairs, {sum(row['mode'] == 'streamed' for row in rows)} "
        f"of them streamed, {sum(bool(row['copies']) for row in rows)} with op offload; highest: "
        f"{worst_gpu:.3f} of the GPU's, {worst:.3f} of the machine's; swapped "
        f"{sum(row['swapped'] for row in rows)} bytes.\n"
        f"* Not counted, two pairs each, since llama-cpp-python alone ends so too: {'; '.join(lost) or 'none'}."
    )
    write_results("gpu-budgets", [{k: v for k, v in row.items() if k != "gpu"} for row in rows], finding)


if __name__ == "__main__":
    main()
