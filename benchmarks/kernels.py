"""Prompts and tokens with repacked weights and without: a model that fits against llama.cpp, or one that streams.

    kernels.py MODEL.gguf ... [--rounds 3] [--threads 1] [--memory 600MiB [--packed]]

Without a model, the kit model grown to 1 GB (Q4_0, 16 layers). All take turns in each round, another one first each
time, and with the page cache as it is: edge-run without repacked weights, with all that can be, and with those that it
chooses (`auto`, its default: the device must have been measured, `edge-run probe`), and llama.cpp with its own loader,
without and with. Compared are a prompt of 512 tokens, one of 32, and 16 tokens one by one, everything in memory; and
opening the model up to its first token. Equal kernels must give the same token. `speed` is that of edge-run's choice
against the faster of llama.cpp's two, by medians. With `--memory`, a budget in which the model streams, edge-run alone
takes turns, and its prompt has 2,000 tokens; with `--packed` it also does so with the file in which `edge-run pack`
wrote the weights repacked, beside the model.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from _box import file_at, grown_model, run_worker, write_results

from edge_run.tiers.packed_file import packed_path

Run: TypeAlias = "tuple[str, str]"  # the loader, and what is repacked
WORKER = Path(__file__).with_name("_kernels_worker.py")
STREAMED_RUNS = (("edge-run", "off"), ("edge-run", "on"), ("edge-run", "auto"))
PACKED_RUNS = (*STREAMED_RUNS, ("edge-run", "auto, packed"))
RUNS = (*STREAMED_RUNS, ("llama.cpp", "off"), ("llama.cpp", "on"))
PROMPTS, STREAMED_PROMPTS = (512, 32), (2000, 32)


def measure(model: Path, rounds: int, threads: int, memory: str, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the figures of each run of `model`, which streams in a budget of `memory` where that is not empty."""
    rows: list[dict[str, Any]] = []
    for number in range(rounds):
        first = number % len(runs)  # which may find the machine, and the file, in another state
        for backend, repack in (*runs[first:], *runs[:first]):
            way, *packed = repack.split(", ")
            flags = [model, "--backend", backend, "--repack", way, "--threads", threads]
            flags += ["--packed", packed_path(model)] if packed else []
            flags += ["--memory", memory, "--prompts", *STREAMED_PROMPTS] if memory else ["--prompts", *PROMPTS]
            figures = run_worker(flags, worker=WORKER)
            told = {"model": model.name, "threads": threads, "round": number, "backend": backend, "repack": repack}
            rows.append({**told, **figures})
            print(rows[-1], flush=True)
        tokens = {(row["repacked"], row["last_token"]) for row in rows[-len(runs) :]}
        if len(tokens) > len({repacked for repacked, _ in tokens}):
            raise SystemExit(f"{model}: equal kernels, other tokens: {sorted(tokens)}")
    return rows


def describe(model: Path, rows: list[dict[str, Any]], memory: str, runs: Sequence[Run]) -> str:
    """Return the medians of each step and run of `model`, in seconds and in processor seconds, and their spread."""
    mine = [row for row in rows if row["model"] == model.name]
    chosen = next(row["repacked"] for row in mine if row["repack"] == "auto") or "none"
    names = " | ".join(f"{backend} {repack}" for backend, repack in runs)
    where = f"{f' in {memory}' if memory else ''}, {mine[0]['threads']} threads"
    lines = [f"{model.name}{where}; `auto` repacks: {chosen}", "", f"| | {names} | speed |"]
    lines.append("|---" * (names.count("|") + 3) + "|")
    steps = ["open", *(f"prompt_{n}" for n in (STREAMED_PROMPTS if memory else PROMPTS)), "decode"]
    for step, (clock, unit) in itertools.product(steps, {"s": "s", "cpu_s": "processor s"}.items()):
        found = {
            run: sorted(row[f"{step}_{clock}"] for row in mine if (row["backend"], row["repack"]) == run)
            for run in runs
        }
        medians = {run: statistics.median(seconds) for run, seconds in found.items()}
        best = min((medians[run] for run in RUNS if run not in STREAMED_RUNS and run in medians), default=None)
        speed = f"{best / medians['edge-run', 'auto']:.2f}" if best else ""
        figures = " | ".join(f"{medians[run]:.2f} ({s[0]:.2f} to {s[-1]:.2f})" for run, s in found.items())
        lines.append(f"| {step.replace('_', ' of ')}, {unit} | {figures} | {speed} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=file_at)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", default="", help="a budget in which the models stream")
    parser.add_argument("--packed", action="store_true", help="where they stream, also with their packed files")
    parser.add_argument("--print-only", action="store_true", help="write no results: the machine is not quiet")
    arguments = parser.parse_args()
    if arguments.packed and not arguments.memory:
        parser.error("--packed is for models that stream: give a budget with --memory")
    models = arguments.models or [grown_model("1G", 16)]
    runs = (PACKED_RUNS if arguments.packed else STREAMED_RUNS) if arguments.memory else RUNS
    how = arguments.rounds, arguments.threads, arguments.memory, runs
    rows = [row for model in models for row in measure(model, *how)]
    finding = f"{__doc__}\n" + "\n".join(describe(model, rows, arguments.memory, runs) for model in models)
    if arguments.print_only:
        print(finding)
    else:
        write_results("kernels-streamed" if arguments.memory else "kernels", rows, finding)


if __name__ == "__main__":
    main()
