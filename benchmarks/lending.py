"""Every byte of the budget works: what is held and read per token, at which budgets, and the peak of the process.

Models are named on the command line, `MODEL.gguf@BUDGET[@CONTEXT]`: real ones, or files of real proportions full of
zeros, whose bytes and peaks are right and whose seconds are not. Each runs once in a process of its own under the
product's defaults: a prompt of 200 tokens, then an answer. Bytes per token are the mean over the second half of the
answer. A budget is kept when the peak of the process is at most the budget, and nothing is swapped. With `--smallest`,
the smallest budget that a refusal names is looked for, and run. With `--beside CONTEXT`, each is run in turn with the
same in a context of that length, with a text as long (`--placed`): a long context is to cost nothing while the text is
short. Then processor seconds count, which other programs change little, beside bytes.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from _box import ROOT, file_at, run_json, spread, write_results

from edge_run.base.units import GIB, MIB, format_size

WORKER = ROOT / "benchmarks" / "_lending_worker.py"
LEAST_MEMORY = "1MiB"


def main() -> None:
    """Run what is named, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=run_at, metavar="MODEL@BUDGET[@CONTEXT]")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--smallest", action="store_true", help="and under the smallest budget that works")
    parser.add_argument("--beside", metavar="CONTEXT", help="and in a context of this length, in turn")
    parser.add_argument("--rounds", type=int, default=3, help="of runs in turn")
    parser.add_argument("--placed", type=int, default=0, help="tokens of a text for which nothing is computed")
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--name", default="lending")
    arguments = parser.parse_args()
    lengths = {name: str(getattr(arguments, name)) for name in ("placed", "prompt", "tokens")}
    options = lengths | ({"threads": str(arguments.threads)} if arguments.threads else {})
    rows = []
    for model, budget, context in arguments.runs:
        budgets = [budget, *([smallest(model, context)] if arguments.smallest else [])]
        turns = [context, arguments.beside] * arguments.rounds if arguments.beside else [context]
        for memory, asked in itertools.product(budgets, turns):
            found = measure(model, memory, asked, options)
            rows.append({"model": model.stem, "asked_context": int(asked), **found})
            print(rows[-1], flush=True)
    shown = [table(rows), *([in_turn(rows)] if arguments.beside else [])]
    write_results(arguments.name, rows, "\n\n".join([__doc__.strip(), *shown]))


def run_at(text: str) -> tuple[Path, str, str]:
    """Return the model, the budget and the context of `MODEL@BUDGET[@CONTEXT]`; a type for argparse."""
    path, *rest = text.split("@")
    if len(rest) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text}: name a budget too, as in model.gguf@2GiB or model.gguf@2GiB@4096")
    return file_at(path), rest[0], rest[1] if rest[1:] else "4096"


def measure(model: Path, memory: str, context: str, options: dict[str, str]) -> dict[str, Any]:
    """Return what a run under `memory` prints."""
    named = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, WORKER, model, "--memory", memory, "--context", context, *named]
    found, _ = run_json([str(part) for part in command])
    return found


def smallest(model: Path, context: str) -> str:
    """Return the smallest budget that works, as refusals name it; a run may hold a little more than its plan."""
    memory = LEAST_MEMORY
    for _ in range(5):
        lengths = ["--context", context, "--prompt", "1", "--tokens", "1"]
        command = [sys.executable, WORKER, model, "--memory", memory, *lengths]
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
        swapped = f", {format_size(row['swapped_bytes'])} swapped" if row["swapped_bytes"] else ""
        lines.append(
            f"| {row['model']} | {row['budget_bytes'] / MIB:,.0f} MiB | {context} | {row['micro_batch_tokens']} | "
            f"{row['mode']} | {format_size(row['held_bytes'])} | {row['bytes_per_token'] / GIB:.3f} GiB | "
            f"{row['planned_bytes_per_token'] / GIB:.3f} GiB | {least / GIB:.3f} GiB | "
            f"{row['peak_bytes'] / row['budget_bytes']:.3f} of the budget{swapped} |"
        )
    return "\n".join(lines)


def in_turn(rows: list[dict[str, Any]]) -> str:
    """Return what each model takes in contexts of both lengths: medians over the rounds, and the least and the most."""
    lines = ["| model | budget | context | read per token | processor seconds per token |", "|---|---|---|---|---|"]
    for model, budget, asked in dict.fromkeys((r["model"], r["budget_bytes"], r["asked_context"]) for r in rows):
        same = [r for r in rows if (r["model"], r["budget_bytes"], r["asked_context"]) == (model, budget, asked)]
        read, cpu = ([r[name] for r in same] for name in ("bytes_per_token", "cpu_s_per_token"))
        lines.append(
            f"| {model} | {budget / MIB:,.0f} MiB | {asked:,} | {median(read) / GIB:.4f} GiB | {spread(cpu, 3)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
