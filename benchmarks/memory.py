"""The budget is a promise: peak resident size of the whole process, with no cap around it and inside a cgroup capped at
the budget.

Models are named on the command line; without names they are kit-moe grown to 2 GB and the kit model grown to 1 GB (16
layers). Each runs under budgets of 25, 50, 75 and 95 % of its file (or the smallest that works, where that is more) and
the product's defaults: a prompt of 2,000 tokens, then an answer of 500, or both shorter in proportion where fewer
tokens fit (`context`). Reached when the peak is at most the budget,
nothing is swapped and no process is killed. `limit hits` is how often the capped group was at its limit and the kernel
had to find memory (its failcnt): what it finds is the page cache of the program's own files, as weights are read past
it. `major faults` are pages that had to be read again: with a storm of them, what was found was in use.

Each run is written down when it ends. With --minutes no run begins after so many, and the next call with the same
--name, on the same day, goes on; several calls may share the models of one name among them with --name of their own.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import time
from pathlib import Path
from typing import Any

from _box import RESULTS, ROOT, grown_model, grown_moe, run_worker, write_results
from lending import smallest

from edge_run.base.units import MIB, parse_size

CONTEXT = 4096
SHARES = (0.25, 0.5, 0.75, 0.95)
WORKER = ROOT / "benchmarks" / "_lending_worker.py"
KINDS = ("free", "capped")
KEY = ("model", "share", "kind")
KEPT = ("mode", "micro_batch_tokens", "context_tokens", "budget_bytes", "peak_bytes", "swapped_bytes", "major_faults")


def main() -> None:
    """Measure what is missing, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL")
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--minutes", type=float, help="begin no run after so many")
    parser.add_argument("--name", default="memory")
    arguments = parser.parse_args()
    flags = ["--context", CONTEXT, "--prompt", arguments.prompt, "--tokens", arguments.tokens]
    flags += ["--threads", arguments.threads] if arguments.threads else []
    stop = time.monotonic() + 60 * arguments.minutes if arguments.minutes else None
    rows = done_before(arguments.name)
    models = arguments.models or (grown_moe("2G"), grown_model("1G", 16))
    done = {tuple(str(row[name]) for name in KEY) for row in rows}
    missing = [one for one in itertools.product(models, SHARES, KINDS) if key_of(*one) not in done]
    least: dict[Path, int] = {}
    for model, share, kind in missing:
        if stop and time.monotonic() > stop:
            print("more is to be done", flush=True)
            break
        if model not in least:
            least[model] = parse_size(smallest(model, str(CONTEXT)))
        budget = int(model.stat().st_size * share)
        if budget < least[model] and share > SHARES[0]:
            continue  # the smallest that works has run
        budget = max(least[model], budget)
        rows.append({"model": model.stem, "share": share, "kind": kind} | measure(model, budget, kind, flags))
        print(rows[-1], flush=True)
        write_results(arguments.name, rows, f"{__doc__.strip()}\n\n{table(rows)}", replaces=True)


def key_of(model: Path, share: float, kind: str) -> tuple[str, ...]:
    """Return what tells a run from all others."""
    return model.stem, str(share), kind


def done_before(name: str) -> list[dict[str, Any]]:
    """Return the rows that calls of today have written under `name`."""
    path = RESULTS / f"{datetime.date.today():%Y-%m-%d}-{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{key: _number(text) for key, text in row.items()} for row in csv.DictReader(file)]


def measure(model: Path, budget: int, kind: str, flags: list[Any]) -> dict[str, Any]:
    """Return the peak of one run: without a cap (`free`), or inside a cgroup of the budget's size (`capped`)."""
    limit = budget if kind == "capped" else None
    found = run_worker([model, "--memory", budget, *flags], {"memory": limit}, model, WORKER)
    box = {"oom_kills": found["box"]["oom_kills"], "limit_hits": found["box"]["limit_hits"]}
    return {name: found[name] for name in KEPT} | box


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows for a reader: a line for each budget that has run both ways."""
    lines = [
        "| model | budget | passes | context | peak, no cap | peak, capped | swapped | killed | limit hits | "
        "major faults, no cap | capped |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model, share in dict.fromkeys((row["model"], row["share"]) for row in rows):
        both = {row["kind"]: row for row in rows if (row["model"], row["share"]) == (model, share)}
        if both.keys() != set(KINDS):
            continue
        free, capped = (both[kind] for kind in KINDS)
        peaks = [f"{row['peak_bytes'] / row['budget_bytes']:.3f}" for row in (free, capped)]
        sums = [str(free[name] + capped[name]) for name in ("swapped_bytes", "oom_kills")]
        lines.append(
            f"| {model} | {free['budget_bytes'] / MIB:,.0f} MiB | {free['micro_batch_tokens']} | "
            f"{free['context_tokens']:,} | {' | '.join([*peaks, *sums])} | {capped['limit_hits']:,} | "
            f"{free['major_faults']:,} | {capped['major_faults']:,} |"
        )
    return "\n".join(lines)


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


if __name__ == "__main__":
    main()
