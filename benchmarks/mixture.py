"""A mixture of experts, streamed by expert, against llama.cpp's mmap, on a small device.

Model: kit-moe grown to 8 GB, wider and not deeper (6 layers, 32 experts of which a token uses 4, F16). Budget and
control group: a quarter of it. Cold; both read the same held-out English, first a prompt of 64 tokens, then token after
token. Three settings: a drive of 500 MB/s with 128 KiB and with 8 MiB of read-ahead (which only mmap has), and one that
is not limited, with 128 KiB; `--only 3` is that with 8 MiB. Beside the bytes per token: what the cache's policy would
read in a replay of the same choices, and the least that any could (the optimum, which knows them beforehand). `packed`
reads the experts from a file that `edge-run pack` made and `--packed` names. Growing adds zeros to a third of the
weights, which would pack to nothing: in this file they are filled up with bytes that are read and skipped, so that it
is as large as one of trained weights (0.85); to unpack that third takes less of the processor than trained weights
would. Passes of a prompt are 64 wide and the context 512 long; with `--defaults` both are what they are where nobody
asks for anything, and nothing is packed.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
from pathlib import Path

from _box import NOVELS, ROOT, grown_moe, need, packed_moe, run_worker, sameness, spread, write_results

from edge_run.prefetch.replay import replay
from edge_run.prefetch.routes import DECODE

WORKER = ROOT / "benchmarks" / "_mixture_worker.py"
BUDGET_SHARE = 0.25
SETTINGS = ((500, 128), (None, 128), (500, 8192), (None, 8192))
FIGURES = ("token_s", "first_token_s", "bytes_per_token", "peak_bytes", "swapped_bytes")


def needed_bytes(trace: Path) -> float:
    """Return the bytes of the experts that were missing, per decoded token."""
    with trace.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    decoded = [row for row in rows if int(row["phase"]) == DECODE]
    return sum(int(row["expert_bytes"]) for row in decoded) / len({row["step"] for row in decoded})


def measure_defaults(model: Path, budget: int, arguments: argparse.Namespace) -> None:
    """Compare with mmap under the product's defaults, and write the results."""
    rows, lines = [], []
    for mbps, readahead_kb in (SETTINGS[number] for number in arguments.only):
        box = {"memory": budget, "disk_mbps": mbps, "readahead_kb": readahead_kb}
        words = [model, "--decode", arguments.decode, "--context", 0, "--micro-batch", 0]
        ratios = []
        for number in range(arguments.rounds):
            ours = run_worker([*words, "--memory", budget], box, model, WORKER)
            mmap = run_worker([*words, "--backend", "llama.cpp"], box, model, WORKER)
            ratios.append(mmap["token_s"] / ours["token_s"])
            rows.append(
                {
                    "disk_mbps": mbps or "unthrottled",
                    "readahead_kb": readahead_kb,
                    "round": number,
                    "over_mmap": ratios[-1],
                    **{f"edge_run_{key}": ours[key] for key in FIGURES},
                    **{f"mmap_{key}": mmap[key] for key in FIGURES},
                    "budget_bytes": budget,
                    "oom_kills": ours["box"]["oom_kills"],
                    "same_tokens": ours["chosen"] == mmap["chosen"],
                }
            )
            print(rows[-1], flush=True)
        lines.append(
            f"* {mbps or 'unthrottled'}, {readahead_kb} KiB: {spread(ratios)} x mmap, "
            f"{sameness(rows[-arguments.rounds :], 'same_tokens')}."
        )
    write_results("mixture-defaults", rows, "\n".join([__doc__ or "", *lines]))


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--decode", type=int, default=40)
    parser.add_argument("--size", default="8G")
    settings = "of the settings, by number; 3: no limit, 8 MiB"
    parser.add_argument("--only", type=int, nargs="*", choices=range(len(SETTINGS)), default=[0, 1, 2], help=settings)
    parser.add_argument("--defaults", action="store_true", help="the width of passes and the context are the default")
    arguments = parser.parse_args()
    need(NOVELS)
    model = grown_moe(arguments.size)
    budget = int(model.stat().st_size * BUDGET_SHARE)
    if arguments.defaults:
        measure_defaults(model, budget, arguments)
        return
    packed_file = packed_moe(model)
    rows, lines = [], []
    for mbps, readahead_kb in (SETTINGS[number] for number in arguments.only):
        decode = arguments.decode if readahead_kb < 1024 else 10
        some = []
        for number in range(arguments.rounds if readahead_kb < 1024 else 1):
            box = {"memory": budget, "disk_mbps": mbps, "readahead_kb": readahead_kb}
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder) / "trace.csv"
                flags = [model, "--decode", decode, "--memory", budget, "--trace", trace]
                ours = run_worker(flags, box, model, WORKER)
                result = replay(trace, [ours["expert_bytes"]], ["default", "optimum"])
                needed = needed_bytes(trace)
            flags = [model, "--decode", decode, "--memory", budget, "--packed", packed_file]
            packed = run_worker(flags, box, packed_file, WORKER)
            mmap = run_worker([model, "--decode", decode, "--backend", "llama.cpp"], box, model, WORKER)
            some.append(
                {
                    "disk_mbps": mbps or "unthrottled",
                    "readahead_kb": readahead_kb,
                    "round": number,
                    "edge_run_token_s": ours["token_s"],
                    "packed_token_s": packed["token_s"],
                    "mmap_token_s": mmap["token_s"],
                    "over_mmap": mmap["token_s"] / ours["token_s"],
                    "packed_over_mmap": mmap["token_s"] / packed["token_s"],
                    "bytes_per_token": ours["bytes_per_token"],
                    "packed_bytes_per_token": packed["bytes_per_token"],
                    "mmap_bytes_per_token": mmap["bytes_per_token"],
                    "policy_bytes_per_token": result.of("default", ours["expert_bytes"]).bytes_per_token,
                    "optimum_bytes_per_token": result.of("optimum", ours["expert_bytes"]).bytes_per_token,
                    "unused_share": 1 - needed / ours["bytes_per_token"],
                    "python_share": ours["python_s_per_token"] / ours["token_s"],
                    "packed_python_share": packed["python_s_per_token"] / packed["token_s"],
                    "first_token_s": ours["first_token_s"],
                    "packed_first_token_s": packed["first_token_s"],
                    "mmap_first_token_s": mmap["first_token_s"],
                    "reader_cpu_s_per_gb": ours["reader_cpu_s_per_gb"],
                    "packed_reader_cpu_s_per_gb": packed["reader_cpu_s_per_gb"],
                    "peak_bytes": max(ours["peak_bytes"], packed["peak_bytes"]),
                    "budget_bytes": budget,
                    "swapped_bytes": ours["swapped_bytes"],
                    "oom_kills": ours["box"]["oom_kills"] + packed["box"]["oom_kills"],
                    "same_tokens": ours["chosen"] == mmap["chosen"] == packed["chosen"],
                }
            )
            print(some[-1], flush=True)
        rows += some
        keys = [key for key in some[0] if key.endswith(("token_s", "_mmap", "unused_share", "python_share"))]
        median = {key: statistics.median(row[key] for row in some) for key in keys}
        lines.append(
            f"* {some[0]['disk_mbps']}, {readahead_kb} KiB: {median['edge_run_token_s']:.2f} s a token, mmap "
            f"{median['mmap_token_s']:.2f} s, {spread(row['over_mmap'] for row in some)} x, "
            f"{sameness(some, 'same_tokens')}; {median['unused_share']:.1%} of what is "
            f"read is not used, {median['python_share']:.1%} of a token is Python. Packed: "
            f"{median['packed_token_s']:.2f} s, {median['packed_over_mmap']:.2f} x mmap."
        )
    write_results("mixture", rows, "\n".join([__doc__ or "", *lines]))


if __name__ == "__main__":
    main()
