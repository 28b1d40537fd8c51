"""Prompts and tokens with repacked weights and without: a model that fits against llama.cpp, or one that streams.

    kernels.py MODEL.gguf ... [--rounds 3] [--threads 1] [--memory 600MiB]

Without a model, the kit model grown to 1 GB (Q4_0, 16 layers). The four take turns in each round. Compared are
processor seconds: a prompt of 512 tokens, one of 32, and 16 tokens one by one, everything in memory; and opening the
model up to its first token. Equal kernels must give the same token. With `--memory`, a budget in which the model
streams, edge-run alone takes turns, its prompt has 2,000 tokens, and the seconds that went by are compared as well.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any

from _box import grown_model, run_worker, write_results

WORKER = Path(__file__).with_name("_kernels_worker.py")
RUNS = (("edge-run", "off"), ("edge-run", "on"), ("llama.cpp", "off"), ("llama.cpp", "on"))
PROMPTS, STREAMED_PROMPTS = (512, 32), (2000, 32)


def measure(model: Path, rounds: int, threads: int, memory: str) -> list[dict[str, Any]]:
    """Return the figures of each run of `model`, which streams in a budget of `memory` where that is not empty."""
    rows: list[dict[str, Any]] = []
    for number in range(rounds):
        for backend, repack in RUNS[:2] if memory else RUNS:
            flags = [model, "--backend", backend, "--repack", repack, "--threads", threads]
            flags += ["--memory", memory, "--prompts", *STREAMED_PROMPTS] if memory else ["--prompts", *PROMPTS]
            figures = run_worker(flags, worker=WORKER)
            rows.append({"model": model.name, "round": number, "backend": backend, "repack": repack, **figures})
            print(rows[-1], flush=True)
        tokens = {(row["repack"], row["last_token"]) for row in rows[-len(RUNS) :]}
        if len(tokens) > len({repack for repack, _ in tokens}):
            raise SystemExit(f"{model}: equal kernels, other tokens: {sorted(tokens)}")
    return rows


def describe(model: Path, rows: list[dict[str, Any]], memory: str) -> str:
    """Return the medians of each step and run, in processor seconds, and of streamed runs in seconds that went by."""
    lines = []
    steps = ["open", *(f"prompt_{n}" for n in (STREAMED_PROMPTS if memory else PROMPTS)), "decode"]
    clocks = {"cpu_s": "processor seconds", **({"s": "seconds"} if memory else {})}
    for step, (clock, name) in itertools.product(steps, clocks.items()):
        figures = []
        for backend, repack in RUNS[:2] if memory else RUNS:
            runs = [
                row for row in rows if (row["model"], row["backend"], row["repack"]) == (model.name, backend, repack)
            ]
            seconds = sorted(row[f"{step}_{clock}"] for row in runs)
            spread = f"({seconds[0]:.2f} to {seconds[-1]:.2f})"
            figures.append(f"{backend} {repack} {statistics.median(seconds):.2f} {spread}")
        what = f"{model.name}{f' in {memory}' if memory else ''}, {step.replace('_', ' of ')}"
        lines.append(f"* {what}, {name} by loader and repacking: {', '.join(figures)}.")
    return "\n".join(lines)


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", default="", help="a budget in which the models stream")
    parser.add_argument("--print-only", action="store_true", help="write no results: the machine is not quiet")
    arguments = parser.parse_args()
    models = arguments.models or [grown_model("1G", 16)]
    rows = [row for model in models for row in measure(model, arguments.rounds, arguments.threads, arguments.memory)]
    finding = f"{__doc__}\n" + "\n".join(describe(model, rows, arguments.memory) for model in models)
    if arguments.print_only:
        print(finding)
    else:
        write_results("kernels-streamed" if arguments.memory else "kernels", rows, finding)


if __name__ == "__main__":
    main()
