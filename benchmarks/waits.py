"""Who waits for whom where answers share passes: a long prompt, a long answer, a flood of one key.

    waits.py MODEL.gguf@BUDGET ... [--mbps 500 0] [--rounds 3]

Each scene is a process of its own in a box of the budget's size, with the product's defaults.

* `riding`: eight answers are made, and a prompt of 2,000 tokens comes. How much longer does a token take while it is
  read? Reach: 10 % in the median.
* `long`: fifteen short answers alone, then beside one with a prompt of 2,000 tokens that came first. Reach: the slowest
  of them takes at most twice as long.
* `flood`: one key asks for 24 answers at once, then three others for four each. What share of the tokens do these get
  until they have all? Fair are three quarters, less what the first key had begun.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from _box import ROOT, WIKITEXT, file_at, model_at, need, run_worker, write_results

from edge_run.base.units import parse_size

WORKER = ROOT / "benchmarks" / "_waits_worker.py"
FIGURES = {  # of each scene: which one counts, how it is called, and what is to be reached
    "riding": ("slowdown", "a token takes longer by, of itself", "<= 0.10"),
    "long": ("ratio", "the slowest short one, times alone", "<= 2"),
    "flood": ("share_of_others", "share of the others", "about 0.75"),
}


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=model_at, metavar="MODEL@BUDGET")
    parser.add_argument("--scenes", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--text", type=file_at, default=WIKITEXT)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbps", type=int, nargs="+", default=[500, 0], help="0: not throttled")
    parser.add_argument("--name", default="waits")
    arguments = parser.parse_args()
    need(arguments.text)
    rows: list[dict[str, Any]] = []
    for path, budget in arguments.models:
        for mbps in arguments.mbps:
            box = {"memory": parse_size(budget), "disk_mbps": mbps or None}
            for number in range(arguments.rounds):
                for scene in arguments.scenes:
                    flags = ["--scene", scene, "--text", arguments.text, "--memory", budget]
                    found = run_worker([path, *flags], box, path, WORKER)
                    box_found = found.pop("box")
                    key = {"model": path.stem, "mbps": mbps, "round": number, "scene": scene}
                    rows.append({**key, **found, "budget_bytes": parse_size(budget), "killed": box_found["oom_kills"]})
                    print(rows[-1], flush=True)
    write_results(arguments.name, rows, f"{(__doc__ or '').strip()}\n\n{table(rows)}")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the figure of each scene, the median of its rounds and all of them."""
    lines = ["| model | MB/s | scene | figure | median | rounds | reach |", "|---|---|---|---|---|---|---|"]
    for model, mbps, scene in dict.fromkeys((row["model"], row["mbps"], row["scene"]) for row in rows):
        name, words, reach = FIGURES[scene]
        wanted = (model, mbps, scene)
        found = sorted(row[name] for row in rows if (row["model"], row["mbps"], row["scene"]) == wanted)
        spread = f"{found[0]:.2f} to {found[-1]:.2f}"
        cells = [model, str(mbps or "no limit"), scene, words, f"{statistics.median(found):.2f}", spread, reach]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
