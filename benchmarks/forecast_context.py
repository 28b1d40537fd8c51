"""What `edge-run plan` says of the speed at each length of the context, against what is measured, on real models; and
how long a token waits at most while weights give room to keys and values.

Models are named on the command line; each runs under half its size and three quarters of it, or the least that works,
with the product's defaults, from a drive of 500 MB/s and from one that is not limited, in a box of the budget. For each
drive the box is probed first. For the tokens of the context nothing is computed, they take their cells. Measured is the
mean over 8 tokens (`--decode`) after two that settle. Before, 300 tokens come one by one (`--grow`): `room` is the
longest that it took to divide the room between weights, keys and values before any pass.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from _box import ROOT, file_at, run_worker, write_results
from _forecast_context_worker import SETTLING
from lending import smallest

from edge_run.base.units import MIB, parse_size

WORKER = ROOT / "benchmarks" / "_forecast_context_worker.py"
CONTEXT = 16_384
SHARES = (0.5, 0.75)
DRIVES = (500.0, 0.0)


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=file_at, metavar="MODEL")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--drives", type=float, nargs="+", default=DRIVES, help="in MB/s; 0 does not limit")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="budgets, of the model's size")
    parser.add_argument("--grow", type=int, default=300)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--name", default="forecast-context")
    arguments = parser.parse_args()
    lengths = ["--grow", arguments.grow, "--decode", arguments.decode + SETTLING]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            least = parse_size(smallest(model, str(arguments.context)))
            for mbps in (speed or None for speed in arguments.drives):
                cache = ["--cache", Path(folder) / f"{model.stem}-{mbps}", "--context", arguments.context]
                run_worker([model, *cache], {"disk_mbps": mbps}, model, WORKER)
                for budget in dict.fromkeys(
                    max(least, int(model.stat().st_size * share)) for share in arguments.shares
                ):
                    box = {"memory": budget, "disk_mbps": mbps}
                    found = run_worker([model, *cache, *lengths, "--memory", budget], box, model, WORKER)
                    common = {"model": model.stem, "disk_mbps": mbps or "unthrottled", "budget_bytes": budget}
                    common |= {name: found[name] for name in ("peak_bytes", "room_longest_s", "room_median_s")}
                    rows += [common | row | {"error": error(row)} for row in found["rows"]]
                    print(*rows[-len(found["rows"]) :], sep="\n", flush=True)
    write_results(arguments.name, rows, "\n\n".join([__doc__.strip(), finding(rows)]))


def error(row: dict[str, Any]) -> float:
    """Return how far off the speed was that was foretold, as a share of the measured one."""
    return float(row["decode_tokens_per_s"] / row["measured_tokens_per_s"] - 1)


def finding(rows: list[dict[str, Any]]) -> str:
    """Return the rows for a reader, and what they say together."""
    lines = [
        "| model | MB/s | budget | tokens | foretold, tokens/s | measured | off by | room, longest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['disk_mbps']} | {row['budget_bytes'] / MIB:,.0f} MiB | {row['tokens']:,} | "
            f"{row['decode_tokens_per_s']:.2f} | {row['measured_tokens_per_s']:.2f} | {row['error']:+.1%} | "
            f"{row['room_longest_s'] * 1000:.1f} ms |"
        )
    errors = [abs(row["error"]) for row in rows]
    within = sum(one <= 0.15 for one in errors)
    longest_ms = max(row["room_longest_s"] for row in rows) * 1000
    return "\n".join(lines) + (
        f"\n\nOff by {statistics.median(errors):.1%} in the median, {max(errors):.1%} at most; {within} of "
        f"{len(errors)} within 15 %. The longest that giving room took: {longest_ms:.1f} ms."
    )


if __name__ == "__main__":
    main()
