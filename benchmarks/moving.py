"""What it costs to read weights and to move them to their place: CPU seconds per GB, computing nothing.

    moving.py [--dense MODEL.gguf] [--mixture MODEL.gguf] [--packed FILE] [--share 0.5] [--gb 8] [--rounds 5]

An open model that streams has the chunks of its graph's segments acquired and released, pass after pass, or experts
that are chosen at random, as many as a token uses. All CPU seconds of the process count, the books that Python keeps
too. What is read for the first time, whose memory is cleared and summed, is not counted. Packed experts count by the
GB that they are unpacked. Reach: dense 0.025 s per GB, a mixture 0.03, packed 0.6.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from _box import file_at, run_worker, write_results

WORKER = Path(__file__).with_name("_moving_worker.py")


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", type=file_at)
    parser.add_argument("--mixture", type=file_at)
    parser.add_argument("--packed", type=file_at, help="a packed file of the mixture")
    parser.add_argument("--share", type=float, default=0.5, help="the budget, of the file")
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--print-only", action="store_true", help="write no results: the machine is not quiet")
    arguments = parser.parse_args()
    if not (arguments.dense or arguments.mixture):
        parser.error("name a model: --dense, --mixture or both")
    if arguments.packed and not arguments.mixture:
        parser.error("--packed is a file of the --mixture")
    ways: dict[str, tuple[Path, list[object]]] = {}
    if arguments.dense:
        ways["dense"] = (arguments.dense, [])
    if arguments.mixture:
        ways["mixture"] = (arguments.mixture, [])
    if arguments.mixture and arguments.packed:
        ways["packed"] = (arguments.mixture, ["--packed", arguments.packed])
    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for way, (model, flags) in ways.items():
            memory = int(arguments.share * model.stat().st_size)
            words = [model, "--memory", memory, "--gb", arguments.gb, "--readers", arguments.readers, *flags]
            rows.append({"way": way, "model": model.name, "round": number, **run_worker(words, worker=WORKER)})
            print(rows[-1], flush=True)
    lines = [__doc__ or ""]
    for way in ways:
        mine = [row for row in rows if row["way"] == way]
        cpu_s = sorted(row["cpu_s_per_gb"] for row in mine)
        lines.append(
            f"* {way} ({mine[0]['model']}): {statistics.median(cpu_s):.4f} s per GB ({cpu_s[0]:.4f} to "
            f"{cpu_s[-1]:.4f}), of which {statistics.median(row['reader_cpu_s_per_gb'] for row in mine):.4f} in the "
            f"readers; {statistics.median(row['gb_per_s'] for row in mine):.2f} GB/s."
        )
    print("\n".join(lines))
    if not arguments.print_only:
        write_results("moving", rows, "\n".join(lines))


if __name__ == "__main__":
    main()
