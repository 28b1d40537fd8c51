"""The budget is a promise: peak resident size of the whole process, with no cap around it and inside a cgroup capped at
the budget.

Models: kit-moe grown to 2 GB, with three KV types; the kit model grown to 1 GB (16 layers), with one. Budgets of 25,
50, 75 and 95 %, a prompt of 2,000 tokens in micro-batches of 32, then 4 tokens. Reached when the peak is at most the
budget, nothing is swapped and no process is killed; that of 50 % is also run in a cgroup of that size.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from _box import grown_model, grown_moe, run_worker, write_results

BOXED_SHARE = 0.5
SHARES = (0.25, 0.5, 0.75, 0.95)


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=2000)
    arguments = parser.parse_args()
    rows = []
    for kind, model, kv_types in (
        ("moe", grown_moe("2G"), ("f16", "q8_0", "q4_0")),
        ("dense", grown_model("1G", 16), ("f16",)),
    ):
        for kv_type in kv_types:
            for share in SHARES:
                row = {"model": kind, "kv_type": kv_type, "share": share}
                rows.append(row | measure(model, int(model.stat().st_size * share), kv_type, share, arguments.prompt))
                print(rows[-1], flush=True)
    worst = max(row["peak_of_budget"] for row in rows)
    write_results(
        "memory",
        rows,
        f"{__doc__}\n* Highest peak: {worst:.3f} of the budget, in {len(rows)} runs without a cap and "
        f"{sum(row['share'] == BOXED_SHARE for row in rows)} in a cgroup; swapped "
        f"{sum(row['swapped_bytes'] for row in rows)} bytes; OOM kills {sum(row['oom_kills'] for row in rows)}.",
    )


def measure(model: Path, budget: int, kv_type: str, share: float, prompt: int) -> dict[str, Any]:
    """Return the peaks of a run without a cap, and at BOXED_SHARE of one inside a cgroup too."""
    flags = [model, "--memory", budget, "--kv-type", kv_type, "--decode", 4]
    flags += ["--prompt", prompt, "--context", 2304, "--micro-batch", 32]
    runs = [run_worker(flags, {"memory": None}, model)]
    if share == BOXED_SHARE:
        runs.append(run_worker(flags, {"memory": budget}, model))
    return {
        "budget_bytes": budget,
        "peak_bytes_free": runs[0]["peak_bytes"],
        "peak_bytes_boxed": runs[-1]["peak_bytes"] if len(runs) > 1 else "",
        "peak_of_budget": max(run["peak_bytes"] for run in runs) / budget,
        "swapped_bytes": sum(run["swapped_bytes"] for run in runs),
        "oom_kills": sum(run["box"]["oom_kills"] for run in runs),
        "prompt_s": [round(run["prompt_s"], 2) for run in runs],
        "token_s": [round(run["mean_token_s"], 3) for run in runs],
    }


if __name__ == "__main__":
    main()
