"""The budget is a promise: peak resident size of the whole process, with no cap around it and inside a cgroup capped at
the budget.

Model: the kit model grown to 1 GB (64 layers). Budgets of 25, 50, 75 and 95 % of it, three KV types, a prompt of 2,000
tokens in micro-batches of 128, then 4 tokens. Reached when the peak is at most the budget, nothing is swapped, no
process is killed, and the speed in the cgroup (run at 50 %) is that without it.
"""

from __future__ import annotations

import argparse

from _box import grown_model, run_worker, write_results

BOXED_SHARE = 0.5


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="1G")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.25, 0.5, 0.75, 0.95])
    parser.add_argument("--kv-types", nargs="*", default=["f16", "q8_0", "q4_0"])
    arguments = parser.parse_args()
    model = grown_model(arguments.size, arguments.layers)
    rows = []
    for kv_type in arguments.kv_types:
        for share in arguments.shares:
            budget = int(model.stat().st_size * share)
            flags = [model, "--memory", budget, "--kv-type", kv_type, "--decode", 4]
            flags += ["--prompt", arguments.prompt, "--context", 2304, "--micro-batch", 128]
            free = run_worker(flags, {"memory": None}, model)
            boxed = run_worker(flags, {"memory": budget}, model) if share == BOXED_SHARE else None
            runs = [run for run in (free, boxed) if run]
            rows.append(
                {
                    "kv_type": kv_type,
                    "share": share,
                    "budget_bytes": budget,
                    "peak_bytes_free": free["peak_bytes"],
                    "peak_bytes_boxed": boxed["peak_bytes"] if boxed else "",
                    "peak_of_budget": max(run["peak_bytes"] for run in runs) / budget,
                    "swapped_bytes": sum(run["swapped_bytes"] for run in runs),
                    "oom_kills": boxed["box"]["oom_kills"] if boxed else "",
                    "prompt_s_free": free["prompt_s"],
                    "prompt_s_boxed": boxed["prompt_s"] if boxed else "",
                    "token_s_free": free["mean_token_s"],
                    "token_s_boxed": boxed["mean_token_s"] if boxed else "",
                }
            )
            print(rows[-1], flush=True)
    worst = max(row["peak_of_budget"] for row in rows)
    boxed_rows = [row for row in rows if row["prompt_s_boxed"]]
    speed = [row["prompt_s_free"] / row["prompt_s_boxed"] for row in boxed_rows]
    write_results(
        "memory",
        rows,
        f"{__doc__}\n* Highest peak: {worst:.3f} of the budget; swapped {sum(row['swapped_bytes'] for row in rows)} "
        f"bytes; OOM kills {sum(row['oom_kills'] for row in boxed_rows)}; the prompt in the cgroup at "
        f"{min(speed, default=0):.2f} to {max(speed, default=0):.2f} of the speed without.",
    )


if __name__ == "__main__":
    main()
