"""Many answers in shared passes against one alone: tokens a second, the time between tokens, what is read.

Models are named on the command line, `MODEL.gguf@BUDGET`. In each round, one request alone (a model opened for one
answer) and `--requests` at once (a model opened for as many; several numbers may be given) run in turn, each cold in a
box of the budget's size where one can be made; prompts are pieces of a text, answers greedy. `tokens/s` counts all
tokens of answers from the start, the reading of prompts included; `steady` counts them while all requests are being
answered. With `--draft FILE` or `--speculate ngram` each is run without guesses and with them, in turn; `per pass` are
the tokens of answers that a pass over the weights gives, those that read prompts included. With `--chosen` another run
has as many at once as the planner chooses for this budget from what is known of the device (`edge-run probe`). With
`--context` all have a context of the same size. With `--exact` no bit of an answer depends on who shares its passes,
and the one alone is made so too. Where the first answers end before the last have begun, nothing is steady.
"""

from __future__ import annotations

import argparse
import statistics
from math import nan
from pathlib import Path
from typing import Any

from _box import ROOT, WIKITEXT, file_at, model_at, need, run_worker, spread, write_results

from edge_run.base.units import GIB, parse_size

WORKER = ROOT / "benchmarks" / "_many_worker.py"


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=model_at, metavar="MODEL@BUDGET")
    parser.add_argument("--requests", type=int, nargs="+", default=[16])
    parser.add_argument("--draft", type=file_at)
    parser.add_argument("--speculate", choices=("ngram",), help="without a draft model")
    parser.add_argument("--no-box", action="store_true", help="neither cold nor throttled: bytes and passes count")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--text", type=file_at, default=WIKITEXT)
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--context", type=int, default=0, help="tokens; 0: as many as the answers need")
    parser.add_argument("--exact", action="store_true", help="no bit of an answer depends on who shares its passes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbps", type=int, nargs="+", default=[500, 0], help="0: not throttled")
    parser.add_argument("--chosen", action="store_true", help="also as many as the planner chooses")
    parser.add_argument("--without-one", action="store_true", help="no request alone to hold them against")
    parser.add_argument("--name", default="many")
    arguments = parser.parse_args()
    need(arguments.text)
    rows = []
    for path, budget in arguments.models:
        for mbps in arguments.mbps:
            for number in range(arguments.rounds):
                alone, chosen = [1] * (not arguments.without_one), [0] * arguments.chosen
                for parallel in dict.fromkeys((*alone, *arguments.requests, *chosen)):
                    for guesses in guessings(arguments):
                        found = measure(path, budget, mbps, parallel, guesses, arguments)
                        key = {"model": path.stem, "budget": budget, "disk_mbps": mbps, "round": number}
                        rows.append({**key, "parallel": parallel, **found})
                        print(rows[-1], flush=True)
    for row in rows:
        row.pop("widths")
    write_results(arguments.name, rows, f"{(__doc__ or '').strip()}\n\n{table(rows)}")


def guessings(arguments: argparse.Namespace) -> list[list[object]]:
    """Return the arguments of a worker by which tokens are not guessed, and those by which they are."""
    guessed: list[object] = ["--draft", arguments.draft] if arguments.draft else ["--speculate", arguments.speculate]
    return [[], guessed] if arguments.draft or arguments.speculate else [[]]


def measure(
    model: Path, budget: str, mbps: int, parallel: int, guesses: list[object], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures of as many requests as run at once."""
    command = [model, "--text", arguments.text, "--memory", budget, "--requests", parallel, "--parallel", parallel]
    command += ["--prompt", arguments.prompt, "--tokens", arguments.tokens, "--kv-type", arguments.kv_type, *guesses]
    command += ["--context", arguments.context, *["--exact"] * arguments.exact]
    if arguments.no_box:
        return run_worker(command, worker=WORKER)
    box = {"memory": parse_size(budget), "disk_mbps": mbps or None}
    found = run_worker(command, box, [model, *([arguments.draft] if arguments.draft else [])], WORKER)
    return {**found, "oom_kills": found.pop("box")["oom_kills"]}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows for a reader: medians over the rounds, and the spread of the ratios."""
    lines = [
        "| model | MB/s | at once | guesses | tokens/s | steady | median gap | p99 gap | read per token | per pass | "
        "peak of the budget |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((*_place(row), row["parallel"], row["speculate"]) for row in rows):
        same = [row for row in rows if (*_place(row), row["parallel"], row["speculate"]) == key]

        def median(name: str, same: list[dict[str, Any]] = same) -> float:
            return statistics.median(row[name] for row in same)

        steady = median("steady_tokens_per_s") or nan
        lines.append(
            f"| {key[0]} in {key[1]} | {key[2] or 'no limit'} | {_at_once(same)} | {key[4]} | "
            f"{median('tokens_per_s'):.2f} | {steady:.2f} | {median('gap_median_s'):.3f} s | "
            f"{median('gap_p99_s'):.3f} s | "
            f"{statistics.median(row['bytes_read'] / row['tokens'] for row in same) / GIB:.3f} GiB | "
            f"{statistics.median(row['tokens'] / row['passes'] for row in same):.2f} | "
            f"{max(row['peak_bytes'] / row['budget_bytes'] for row in same):.3f} |"
        )
    ratios: dict[str, list[float]] = {}
    for row in rows:
        model, budget, mbps = _place(row)
        if row["speculate"] != "off":
            against, what = (row["parallel"], "off"), f"{row['parallel'] or 'chosen'} with guesses against without"
        elif row["parallel"] != 1:
            against, what = (1, "off"), f"{row['parallel'] or 'chosen'} against one alone"
        else:
            continue
        same_round = (one for one in rows if (*_place(one), one["round"]) == (*_place(row), row["round"]))
        other = next((one for one in same_round if (one["parallel"], one["speculate"]) == against), None)
        if other is None:
            continue
        for figure, name in (("tokens_per_s", "with prompts"), ("steady_tokens_per_s", "steady")):
            found = ratios.setdefault(f"**{model} in {budget}, {mbps or 'no limit'}**, {what}: {name}", [])
            if row[figure] and other[figure]:
                found.append(row[figure] / other[figure])
    n_rounds = len({row["round"] for row in rows})
    lines.append("")
    for what, found in ratios.items():
        said = f"{spread(found)} times the tokens" if found else "nothing"
        of = "" if len(found) == n_rounds else f", in {len(found)} of {n_rounds} rounds"
        lines.append(f"* {what}, {said}{of}")
    return "\n".join(lines)


def _place(row: dict[str, Any]) -> tuple[str, str, int]:
    """Return what runs that are compared have in common."""
    return row["model"], row["budget"], row["disk_mbps"]


def _at_once(rows: list[dict[str, Any]]) -> str:
    """Return how many were answered at once, and whether the planner chose that."""
    numbers = "/".join(str(number) for number in dict.fromkeys(row["abreast"] for row in rows))
    return numbers if rows[0]["parallel"] else f"{numbers} (chosen)"


if __name__ == "__main__":
    main()
