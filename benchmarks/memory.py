"""The budget is a promise: peak resident size of the whole process, with no cap around it and inside a cgroup capped at
the budget.

Models are named on the command line; without names they are kit-moe grown to 2 GB and the kit model grown to 1 GB (16
layers). Each runs under budgets of 25, 50, 75 and 95 % of its file (or the smallest that works, where that is more) and
the product's defaults: a prompt of 2,000 tokens, then an answer of 500, or both shorter in proportion where fewer
tokens fit (`context`). Reached when the peak is at most the budget,
nothing is swapped and no process is killed. `limit hits` is how often the capped group was at its limit and the kernel
had to find memory: what it finds is the page cache of the program's own files, as weights are read past it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from _box import ROOT, grown_model, grown_moe, run_worker, write_results
from lending import smallest

from edge_run.base.units import MIB, parse_size

CONTEXT = 4096
SHARES = (0.25, 0.5, 0.75, 0.95)
WORKER = ROOT / "benchmarks" / "_lending_worker.py"


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL")
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--name", default="memory")
    arguments = parser.parse_args()
    flags = ["--context", CONTEXT, "--prompt", arguments.prompt, "--tokens", arguments.tokens]
    flags += ["--threads", arguments.threads] if arguments.threads else []
    rows = []
    for model in arguments.models or (grown_moe("2G"), grown_model("1G", 16)):
        least = parse_size(smallest(model, str(CONTEXT)))
        for budget in dict.fromkeys(max(least, int(model.stat().st_size * share)) for share in SHARES):
            rows.append(measure(model, budget, flags))
            print(rows[-1], flush=True)
    write_results(arguments.name, rows, f"{__doc__.strip()}\n\n{table(rows)}")


def measure(model: Path, budget: int, flags: list[Any]) -> dict[str, Any]:
    """Return the peaks of a run without a cap, and of one inside a cgroup of the budget's size."""
    run = [model, "--memory", budget, *flags]
    free, capped = (run_worker(run, {"memory": limit}, model, WORKER) for limit in (None, budget))
    return {
        "model": model.stem,
        "budget_bytes": budget,
        "mode": free["mode"],
        "micro_batch_tokens": free["micro_batch_tokens"],
        "context_tokens": free["context_tokens"],
        "peak_bytes_free": free["peak_bytes"],
        "peak_bytes_capped": capped["peak_bytes"],
        "swapped_bytes": free["swapped_bytes"] + capped["swapped_bytes"],
        "oom_kills": capped["box"]["oom_kills"],
        "limit_hits": capped["box"]["limit_hits"],
        "worst_token_s": capped["worst_token_s"],
        "token_s": capped["token_s"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows for a reader."""
    lines = [
        "| model | budget | passes | context | peak, no cap | peak, capped | swapped | killed | limit hits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        free, capped = (row[f"peak_bytes_{kind}"] / row["budget_bytes"] for kind in ("free", "capped"))
        lines.append(
            f"| {row['model']} | {row['budget_bytes'] / MIB:,.0f} MiB | {row['micro_batch_tokens']} | "
            f"{row['context_tokens']:,} | {free:.3f} | {capped:.3f} | {row['swapped_bytes']} | {row['oom_kills']} | "
            f"{row['limit_hits']:,} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
