"""The budget is a promise: peak resident size of the whole process, with no cap around it and inside a cgroup capped at
the budget.

Model: the kit model grown to 4 GB. Budgets of 12, 25, 50 and 75 % of it; a prompt of 400 tokens, then 4 tokens. Reached
when the peak is at most the budget, nothing is swapped, no process is killed, and the speed in the cgroup is that
without it.
"""

from __future__ import annotations

import argparse

from _box import grown_model, run_worker, write_results


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="4G")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.12, 0.25, 0.5, 0.75])
    arguments = parser.parse_args()
    model = grown_model(arguments.size, 32)
    rows = []
    for share in arguments.shares:
        budget = int(model.stat().st_size * share)
        flags = [model, "--memory", budget, "--prompt", 400, "--decode", 4]
        free, boxed = run_worker(flags, {"memory": None}, model), run_worker(flags, {"memory": budget}, model)
        rows.append(
            {
                "share": share,
                "budget_bytes": budget,
                "peak_bytes_free": free["peak_bytes"],
                "peak_bytes_boxed": boxed["peak_bytes"],
                "peak_of_budget": max(free["peak_bytes"], boxed["peak_bytes"]) / budget,
                "swapped_bytes": free["swapped_bytes"] + boxed["swapped_bytes"],
                "oom_kills": boxed["box"]["oom_kills"],
                "token_s_free": free["mean_token_s"],
                "token_s_boxed": boxed["mean_token_s"],
            }
        )
        print(rows[-1], flush=True)
    worst = max(row["peak_of_budget"] for row in rows)
    speed = [row["token_s_free"] / row["token_s_boxed"] for row in rows]
    finding = (
        f"{__doc__}\n* Highest peak: {worst:.3f} of the budget; swapped {sum(r['swapped_bytes'] for r in rows)} bytes; "
        f"OOM kills {sum(r['oom_kills'] for r in rows)}; "
        f"speed in the cgroup {min(speed):.2f} to {max(speed):.2f} of that without."
    )
    write_results("memory", rows, finding)


if __name__ == "__main__":
    main()
