"""Many answers in shared passes against one alone: tokens a second, the time between tokens, what is read.

Models are named on the command line, `MODEL.gguf@BUDGET`. In each round, one request alone (a model opened for one
answer) and `--requests` at once (a model opened for as many) run in turn, each cold in a box of the budget's size where
one can be made; prompts are pieces of a text, answers greedy. `tokens/s` counts all tokens of answers from the start,
the reading of prompts included; `steady` counts them while all requests are being answered. With `--chosen` a third
run has as many at once as the planner chooses for this budget; the device must have been measured (`edge-run probe`).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from _box import ROOT, SHARED, run_worker, write_results

from edge_run.base.units import GIB, parse_size

WORKER = ROOT / "benchmarks" / "_many_worker.py"


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL@BUDGET")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--text", type=Path, default=SHARED / "data" / "text" / "wikitext-2-valid.txt")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbps", type=int, nargs="+", default=[500, 0], help="0: not throttled")
    parser.add_argument("--chosen", action="store_true", help="also as many as the planner chooses")
    parser.add_argument("--name", default="many")
    arguments = parser.parse_args()
    rows = []
    for named in arguments.models:
        path, budget = named.split("@")
        for mbps in arguments.mbps:
            for number in range(arguments.rounds):
                rows += [
                    {"model": Path(path).stem, "disk_mbps": mbps, "round": number, "parallel": parallel, **found}
                    for parallel in (1, arguments.requests, *[0] * arguments.chosen)
                    for found in [measure(Path(path), budget, mbps, parallel, arguments)]
                ]
                print(*rows[-2 - arguments.chosen :], sep="\n", flush=True)
    write_results(arguments.name, rows, f"{(__doc__ or '').strip()}\n\n{table(rows)}")


def measure(model: Path, budget: str, mbps: int, parallel: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of as many requests as run at once."""
    command = [model, "--text", arguments.text, "--memory", budget, "--requests", parallel, "--parallel", parallel]
    command += ["--prompt", arguments.prompt, "--tokens", arguments.tokens, "--kv-type", arguments.kv_type]
    box = {"memory": parse_size(budget), "disk_mbps": mbps or None}
    found = run_worker(command, box, model, WORKER)
    return {**found, "oom_kills": found.pop("box")["oom_kills"]}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows for a reader: medians over the rounds, and the spread of the ratios."""
    lines = [
        "| model | MB/s | at once | tokens/s | steady | median gap | p99 gap | read per token | peak of the budget |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ratios: dict[tuple[str, int, int], list[float]] = {}
    for key in dict.fromkeys((row["model"], row["disk_mbps"], row["parallel"]) for row in rows):
        same = [row for row in rows if (row["model"], row["disk_mbps"], row["parallel"]) == key]

        def median(name: str, same: list[dict[str, Any]] = same) -> float:
            return statistics.median(row[name] for row in same)

        lines.append(
            f"| {key[0]} | {key[1] or 'no limit'} | {_at_once(same)} | {median('tokens_per_s'):.2f} | "
            f"{median('steady_tokens_per_s'):.2f} | {median('gap_median_s'):.3f} s | {median('gap_p99_s'):.3f} s | "
            f"{statistics.median(row['bytes_read'] / row['tokens'] for row in same) / GIB:.3f} GiB | "
            f"{max(row['peak_bytes'] / row['budget_bytes'] for row in same):.3f} |"
        )
    alone: dict[str, Any] = {}
    for row in rows:
        if row["parallel"] == 1:
            alone = row
            continue
        key = row["model"], row["disk_mbps"], row["parallel"]
        ratios.setdefault(key, []).append(row["steady_tokens_per_s"] / alone["steady_tokens_per_s"])
    lines += [
        "",
        *(
            f"* **{model}, {mbps or 'no limit'}, {parallel or 'chosen'}**: steady, {statistics.median(found):.2f} "
            f"times the tokens of one alone ({min(found):.2f} to {max(found):.2f})"
            for (model, mbps, parallel), found in ratios.items()
        ),
    ]
    return "\n".join(lines)


def _at_once(rows: list[dict[str, Any]]) -> str:
    """Return how many were answered at once, and whether the planner chose that."""
    numbers = "/".join(str(number) for number in dict.fromkeys(row["abreast"] for row in rows))
    return numbers if rows[0]["parallel"] else f"{numbers} (chosen)"


if __name__ == "__main__":
    main()
