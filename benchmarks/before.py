"""An earlier revision and this one, in turn: seconds per token of a model that fits, of one that streams, of a mixture.

The models are those of `resident.py`, `streaming.py` and `mixture.py`, and so are the budgets and the small device; the
earlier revision runs its own worker in a checkout of its own, under the same Python. Its ratio is taken round by round:
above 1, this revision is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _box import READAHEAD_KB, ROOT, grown_model, grown_moe, run_json, write_results
from edgebox import boxed

CASES = ("resident", "streaming-500", "streaming", "mixture-500", "mixture")
SHARES = {"streaming": 0.5, "mixture": 0.25}


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--name", default="before")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=ROOT.parent) as folder:  # beside this checkout: both share what lies there
        checkout = Path(folder)
        _git("worktree", "add", "--quiet", "--detach", str(checkout), arguments.revision)
        try:
            for case in arguments.only:
                for number in range(arguments.rounds):
                    rows.append(turn(case, number, checkout))
                    print(rows[-1], flush=True)
        finally:
            _git("worktree", "remove", "--force", str(checkout))
    write_results(arguments.name, rows, f"{__doc__.strip()}\n\nBefore: {arguments.revision}.\n\n{table(rows)}")


def turn(case: str, number: int, checkout: Path) -> dict[str, Any]:
    """Run both revisions once, the order changing from round to round; return what a token took."""
    kind, _, mbps = case.partition("-")
    checkouts = {"before": checkout, "now": ROOT}
    found = {
        name: measure(kind, int(mbps) if mbps else None, checkouts[name])
        for name in (("before", "now") if number % 2 else ("now", "before"))
    }
    tokens_s = {name: figures["mean_token_s" if kind == "streaming" else "token_s"] for name, figures in found.items()}
    return {
        "case": case,
        "round": number,
        "before_token_s": tokens_s["before"],
        "now_token_s": tokens_s["now"],
        "ratio": tokens_s["before"] / tokens_s["now"],
        "before_bytes_per_token": found["before"]["bytes_per_token"],
        "now_bytes_per_token": found["now"]["bytes_per_token"],
    }


def measure(kind: str, mbps: int | None, checkout: Path) -> dict[str, Any]:
    """Return the figures of the worker of `checkout`."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    worker = checkout / "benchmarks" / ("_mixture_worker.py" if kind == "mixture" else "_worker.py")
    model = {"resident": ("1G", 16), "streaming": ("4G", 32)}.get(kind)
    path = grown_model(*model) if model else grown_moe("8G")
    flags = {"resident": ["--decode", "24", "--warm", "4"], "streaming": ["--decode", "6", "--prompt", "4"]}
    command = [sys.executable, str(worker), str(path), *flags.get(kind, ["--decode", "40"])]
    if kind in SHARES:
        budget = int(path.stat().st_size * SHARES[kind])
        box: dict[str, Any] = {"memory": budget, "disk_mbps": mbps, "readahead_kb": READAHEAD_KB}
        command = boxed([*command, "--memory", str(budget)], **box, cold=path)
    figures, _ = run_json(command, env=environment)
    return figures


def table(rows: list[dict[str, Any]]) -> str:
    """Return what each case took, and its ratio with the spread."""
    lines = ["| case | before | now | ratio, median | spread |", "|---|---|---|---|---|"]
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        ratios = [row["ratio"] for row in of_case]
        before, now = (statistics.median(row[f"{name}_token_s"] for row in of_case) for name in ("before", "now"))
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        lines.append(f"| {case} | {before:.4f} s | {now:.4f} s | {statistics.median(ratios):.3f} | {spread} |")
    return "\n".join(lines)


def _git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
