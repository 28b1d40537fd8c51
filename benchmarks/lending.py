"""Every byte of the budget works: what is held and read per token, at which budgets, and the peak of the process.

Models are named on the command line, `MODEL.gguf@BUDGET[@CONTEXT]`: real ones, or files of real proportions full of
zeros, whose bytes and peaks are right and whose seconds are not. Each runs once in a process of its own under the
product's defaults: a prompt of 200 tokens, then an answer. Bytes per token are the mean over the second half of the
answer. A budget is kept when the peak of the process is at most the budget, and nothing is swapped. With `--smallest`,
the smallest budget that a refusal names is looked for, and run.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from _box import ROOT, run_json, write_results

from edge_run.base.units import GIB, MIB, format_size

WORKER = ROOT / "benchmarks" / "_lending_worker.py"
LEAST_MEMORY = "1MiB"


def main() -> None:
    """Run what is named, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="MODEL@BUDGET[@CONTEXT]")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--smallest", action="store_true", help="and under the smallest budget that works")
    parser.add_argument("--name", default="lending")
    arguments = parser.parse_args()
    rows = []
    for run in arguments.runs:
        model, budget, context = (*run.split("@"), "4096")[:3]
        budgets = [budget, *([smallest(Path(model), context)] if arguments.smallest else [])]
        for memory in budgets:
            found = measure(Path(model), memory, context, arguments.tokens)
            rows.append({"model": Path(model).stem, "asked_context": int(context), **found})
            print(rows[-1], flush=True)
    write_results(arguments.name, rows, f"{__doc__.strip()}\n\n{table(rows)}")


def measure(model: Path, memory: str, context: str, tokens: int) -> dict[str, Any]:
    """Return what a run under `memory` prints."""
    command = [sys.executable, WORKER, model, "--memory", memory, "--context", context, "--tokens", str(tokens)]
    found, _ = run_json([str(part) for part in command])
    return found


def smallest(model: Path, context: str) -> str:
    """Return the smallest budget that works, as refusals name it; a run may hold a little more than its plan."""
    memory = LEAST_MEMORY
    for _ in range(5):
        command = [sys.executable, WORKER, model, "--memory", memory, "--context", context, "--tokens", "1"]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        needed = re.search(r"at least (\d+) MiB", done.stderr)
        if done.returncode == 0 or not needed:
            return memory
        memory = f"{needed[1]}MiB"
    return memory


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows for a reader."""
    lines = [
        "| model | budget | context | passes | mode | held at first | read per token | planned | not held | peak |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        least = max(0, row["model_bytes"] - row["held_bytes"])
        context = f"{row['context_tokens']:,} of {row['asked_context']:,}"
        lines.append(
            f"| {row['model']} | {row['budget_bytes'] / MIB:,.0f} MiB | {context} | {row['micro_batch_tokens']} | "
            f"{row['mode']} | {format_size(row['held_bytes'])} | {row['bytes_per_token'] / GIB:.3f} GiB | "
            f"{row['planned_bytes_per_token'] / GIB:.3f} GiB | {least / GIB:.3f} GiB | "
            f"{row['peak_bytes'] / row['budget_bytes']:.3f} of the budget |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
