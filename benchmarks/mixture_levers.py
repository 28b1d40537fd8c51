"""What each tunable of streaming by expert gains by itself: one way after the other, on a limited drive and a fast one.

Model: kit-moe grown to 8 GB, wider and not deeper. Budget and control group: a quarter of it. Cold; all read the same
held-out English, a prompt of 64 tokens and then token after token. `serial` reads with one thread, keeps no expert from
one token to the next and reads none ahead; every other line adds something to the one that it is compared with.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from _box import NOVELS, ROOT, grown_moe, need, run_worker, spread, write_results

WORKER = ROOT / "benchmarks" / "_mixture_worker.py"
BUDGET_SHARE = 0.25
WAYS: dict[str, tuple[str, list[object]]] = {  # what it is compared with, and its flags
    "serial": ("serial", ["--no-cache", "--readers", 1, "--prefetch", "off"]),
    "readers": ("serial", ["--no-cache", "--prefetch", "off"]),
    "cache": ("readers", ["--prefetch", "off"]),
    "cache lru": ("cache", ["--prefetch", "off", "--policy", "lru"]),
    "prefetch 1": ("cache", ["--prefetch", "1"]),
    "prefetch 1+": ("cache", ["--prefetch", "1+"]),
    "prefetch 2": ("cache", ["--prefetch", "2"]),
    "auto": ("cache", ["--prefetch", "auto"]),
}


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--decode", type=int, default=40)
    parser.add_argument("--size", default="8G")
    parser.add_argument("--disk-mbps", type=int, nargs="*", default=[0, 500], help="0: not limited")
    arguments = parser.parse_args()
    need(NOVELS)
    model: Path = grown_moe(arguments.size)
    budget = int(model.stat().st_size * BUDGET_SHARE)
    rows, lines = [], []
    for mbps in arguments.disk_mbps:
        box = {"memory": budget, "disk_mbps": mbps}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(arguments.rounds):
            for way, (_, flags) in WAYS.items():
                figures = run_worker(
                    [model, "--decode", arguments.decode, "--memory", budget, *flags], box, model, WORKER
                )
                times[way].append(figures["token_s"])
                experts = figures["experts"]
                rows.append(
                    {
                        "disk_mbps": mbps or "unthrottled",
                        "way": way,
                        "round": number,
                        **{key: figures[key] for key in ("token_s", "bytes_per_token", "python_s_per_token")},
                        **{key: experts[key] for key in ("hit_rate", "prefetched_bytes", "unused_bytes", "tunables")},
                        "tried": [(found["tried"], found["gain"]) for found in experts["decisions"]],
                    }
                )
                print(rows[-1], flush=True)
        for way, (other, _) in WAYS.items():
            gains = [a / b for a, b in zip(times[other], times[way], strict=True)]
            over_serial = statistics.median(a / b for a, b in zip(times["serial"], times[way], strict=True))
            lines.append(
                f"* {mbps or 'unthrottled'}, {way}: {statistics.median(times[way]):.3f} s a token, "
                f"{spread(gains)} x {other}, {over_serial:.2f} x serial."
            )
    write_results("mixture-levers", rows, "\n".join([__doc__ or "", *lines]))


if __name__ == "__main__":
    main()
