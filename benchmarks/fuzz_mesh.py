"""What members say to each other in a run, hostile: commands through to llama.cpp, activations, headers, orders,
answers, 100,000 inputs each; a part of `fuzz_parsers.py`, which says what a defect is and how memory is measured.

Commands are carried out by a slice of a small model, with canaries after each array of llama.cpp's batch; orders by a
worker; answers are made a plan of.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from _box import write_results
from fuzz_parsers import INPUTS, told, try_target

TARGETS = [f"{what} of a run" for what in ("commands", "activations", "headers", "orders", "answers")]


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=INPUTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time; what is slow is slower then")
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    rows = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(lambda name: try_target(name, arguments.count, arguments.seed, False), TARGETS):
            rows.append(row)
            print(*row.values(), sep="\t", flush=True)
    finding = f"{__doc__}\n{told(rows, arguments.seed)}"
    print(finding)
    if not arguments.dry:
        write_results("fuzz-mesh", rows, finding)
    sys.exit(1 if any(row["defects"] for row in rows) else 0)


if __name__ == "__main__":
    main()
