"""A model that streams, with a draft model, with repacked weights and without: tokens a second after the prompt.

    repacked_draft.py MODEL.gguf DRAFT.gguf [--memory 2.5GiB] [--rounds 5] [--packed MODEL.packed]

Passes verify several guesses, which kernels for repacked weights compute faster. In each round every way runs once, in
turn, cold, in a control group of the budget, the drive not limited: `off`, `auto` (what the device's figures say:
`edge-run probe --model` must have measured both models, else it is `off`), `on`, and with `--packed` also `auto` with a
packed file (`edge-run pack`). All continue the same text greedily; ways that repack the same weights must say the same.
`drive` is the share of plain direct reads' bandwidth, measured in the same round, that a way reaches over its tokens:
no way can be faster than 1 with the bytes that it reads.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from _box import file_at, run_worker, spread, write_results
from _worker import direct_read_bandwidth

from edge_run.base.units import MIB, parse_size

WORKER = Path(__file__).with_name("_speculation_worker.py")
READERS, DIRECT_BYTES = 4, 1024 * MIB


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=file_at)
    parser.add_argument("draft", type=file_at)
    parser.add_argument("--memory", default="2.5GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--text", default="docs")
    parser.add_argument("--packed", type=file_at)
    parser.add_argument("--print-only", action="store_true", help="write no results: the machine is not quiet")
    arguments = parser.parse_args()
    ways: dict[str, list[object]] = {way: ["--repack", way, "--packed", "off"] for way in ("off", "auto", "on")}
    if arguments.packed:
        ways["auto, packed"] = ["--repack", "auto", "--packed", arguments.packed]
    box = {"memory": parse_size(arguments.memory), "disk_mbps": None}
    common = [arguments.model, "--draft", arguments.draft, "--memory", arguments.memory]
    common += ["--text", arguments.text, "--tokens", arguments.tokens]
    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        direct = direct_read_bandwidth(arguments.model, READERS, DIRECT_BYTES)
        for way, flags in ways.items():
            run = run_worker([*common, *flags], box, arguments.model, WORKER)
            speculation = run["speculations"][0]
            rows.append(
                {
                    "round": number,
                    "way": way,
                    "repacked": run["repacked"],
                    "read_repacked": run["read_repacked"],
                    "tokens_per_s": run["tokens_per_s"],
                    "bytes_per_token": run["decode_bytes_per_token"],
                    "direct_bytes_per_s": direct,
                    "drive": run["tokens_per_s"] * run["decode_bytes_per_token"] / direct,
                    "tokens_per_pass": speculation["tokens_per_pass"],
                    "peak_bytes": run["peak_bytes"],
                    "budget_bytes": run["budget_bytes"],
                    "oom_kills": run["box"]["oom_kills"],
                    "answer": " ".join(map(str, run["answers"][0])),
                }
            )
            print(rows[-1], flush=True)
    finding = f"{__doc__}\n{describe(arguments.model.name, arguments.memory, list(ways), rows)}"
    print(finding)
    if not arguments.print_only:
        write_results("repacked-draft", rows, finding)


def describe(name: str, memory: str, ways: list[str], rows: list[dict[str, Any]]) -> str:
    """Return the medians of each way, as a table."""
    by_way = {way: [row for row in rows if row["way"] == way] for way in ways}
    lines = [f"{name} in {memory}", "", "| | repacked | tokens a second | over `off` | drive |", "|---" * 5 + "|"]
    for way, mine in by_way.items():
        answers = {row["answer"] for row in rows if row["repacked"] == mine[0]["repacked"]}
        ratios = [row["tokens_per_s"] / plain["tokens_per_s"] for row, plain in zip(mine, by_way["off"], strict=True)]
        speed, drive = (statistics.median(row[key] for row in mine) for key in ("tokens_per_s", "drive"))
        held = f"{mine[0]['repacked'] or 'nothing'}{', in the file' * mine[0]['read_repacked']}"
        lines.append(
            f"| {way}{' OTHER TOKENS' * (len(answers) > 1)} | {held} | {speed:.2f} | {spread(ratios)} | {drive:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
