"""Reading a model that fits, cold, and repacking it on the way: from the first read to the last weight ready.

    load_repacked.py [MODEL.gguf] [--rounds 5]

Without a model, the kit model grown to 1 GB (Q4_0, 16 layers). In each round with repacked weights and without, in
turn, each in a process of its own, by direct reads into memory that was never used. The budget is what the plan of a
repacked run takes, and 2 % more, as no two processes take the same. `bound` is the longer of two: reading alone, which
is the run without; and repacking on all cores, which is what the readers' threads take more of the processor, by its
cores. Reach: 1.05 times the bound, and a peak within the budget.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

from _box import file_at, grown_model, run_worker, spread, write_results

WORKER = Path(__file__).with_name("_load_repacked_worker.py")
SPARE = 1.02


def measure(model: Path, number: int, budget: int, cores: int) -> dict[str, Any]:
    """Return the figures of one round."""
    on, off = (run_worker([model, "--repack", way, "--memory", budget], worker=WORKER) for way in ("on", "off"))
    if on["mode"] != "resident" or not on["repacked"]:
        raise SystemExit(f"{model}: {on['mode']}, repacked: {on['repacked'] or 'nothing'}; this compares nothing")
    repack_s = (on["reader_cpu_s"] - off["reader_cpu_s"]) / cores
    bound_s = max(off["ready_s"], repack_s)
    return {
        "model": model.name,
        "round": number,
        "repacked": on["repacked"],
        "ready_s": on["ready_s"],
        "reading_s": off["ready_s"],
        "repacking_s": repack_s,
        "over_bound": on["ready_s"] / bound_s,
        "gb_per_s": on["bytes_read"] / on["ready_s"] / 1e9,
        "reader_cpu_s": on["reader_cpu_s"],
        "peak_bytes": on["peak_bytes"],
        "budget_bytes": on["budget_bytes"],
    }


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=file_at)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--print-only", action="store_true", help="write no results: the machine is not quiet")
    arguments = parser.parse_args()
    model, cores = arguments.model or grown_model("1G", 16), len(os.sched_getaffinity(0))
    budget = int(SPARE * run_worker([model], worker=WORKER)["needed_bytes"])
    rows = []
    for number in range(arguments.rounds):
        rows.append(measure(model, number, budget, cores))
        print(rows[-1], flush=True)
    median = {key: statistics.median(row[key] for row in rows) for key in ("ready_s", "reading_s", "repacking_s")}
    peak = max(row["peak_bytes"] / row["budget_bytes"] for row in rows)
    finding = (
        f"{__doc__}\n* {model.name}: ready after {median['ready_s']:.2f} s; reading alone {median['reading_s']:.2f} s, "
        f"repacking on {cores} cores {median['repacking_s']:.2f} s: {spread(row['over_bound'] for row in rows)} of the "
        f"bound; peak {peak:.3f} of the budget."
    )
    print(finding)
    if not arguments.print_only:
        write_results("load-repacked", rows, finding)


if __name__ == "__main__":
    main()
