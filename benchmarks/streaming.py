"""Streaming against its physical limit, and against llama.cpp's mmap, on a small device.

Model: the kit model grown to 4 GB (32 layers, Q4_0). Budget and cgroup: half the model. Per disk speed, interleaved in
each round: edge-run and mmap, both cold, in the same box with 128 KiB read-ahead (`--readahead-kb`); compute alone is
the same model all resident, no box. The bound is max(compute alone, bytes read per token / bandwidth of plain direct
reads, measured in the same run). Passes of a prompt are 32 wide and the context 512 long; with `--defaults` all have
what they have where nobody asks for anything.
"""

from __future__ import annotations

import argparse
import statistics

from _box import READAHEAD_KB, grown_model, run_worker, sameness, spread, write_results

BUDGET_SHARE = 0.5


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode", type=int, default=6)
    parser.add_argument("--size", default="4G")
    parser.add_argument("--defaults", action="store_true", help="the width of passes and the context are the default")
    parser.add_argument("--mbps", type=int, nargs="+", default=[500, 0], help="0: not throttled")
    parser.add_argument("--readahead-kb", type=int, default=READAHEAD_KB, help="of the drive; only mmap has it")
    arguments = parser.parse_args()
    model = grown_model(arguments.size, 32)
    budget = int(model.stat().st_size * BUDGET_SHARE)
    rows, lines = [], []
    for mbps in (given or None for given in arguments.mbps):
        per_round = []
        for number in range(arguments.rounds):
            box = {"memory": budget, "disk_mbps": mbps, "readahead_kb": arguments.readahead_kb}
            decode = ["--decode", arguments.decode, "--prompt", 4]
            decode += ["--context", 0, "--micro-batch", 0] if arguments.defaults else []
            ours = run_worker([model, "--memory", budget, "--direct-read", 1024, *decode], box, model)
            mmap = run_worker([model, "--backend", "llama.cpp", *decode], box, model)
            alone = run_worker([model, *decode])
            bound_s = max(alone["token_s"], ours["bytes_per_token"] / ours["direct_bytes_per_s"])
            least = model.stat().st_size - (budget - ours["other_bytes"] - ours["window_bytes"])
            row = {
                "disk_mbps": mbps or "unthrottled",
                "readahead_kb": arguments.readahead_kb,
                "round": number,
                "edge_run_token_s": ours["mean_token_s"],
                "mmap_token_s": mmap["mean_token_s"],
                "compute_alone_s": alone["token_s"],
                "direct_gb_per_s": ours["direct_bytes_per_s"] / 1e9,
                "bound_s": bound_s,
                "of_bound": bound_s / ours["mean_token_s"],
                "over_mmap": mmap["mean_token_s"] / ours["mean_token_s"],
                "bytes_per_token": ours["bytes_per_token"],
                "bytes_over_least": ours["bytes_per_token"] / least,
                "reader_cpu_s_per_gb": ours["reader_cpu_s_per_gb"],
                "peak_bytes": ours["peak_bytes"],
                "budget_bytes": budget,
                "swapped_bytes": ours["swapped_bytes"],
                "oom_kills": ours["box"]["oom_kills"],
                "same_token": ours["last_token"] == mmap["last_token"] == alone["last_token"],
            }
            print(row, flush=True)
            rows.append(row)
            per_round.append(row)
        lines.append(_summary(per_round))
    write_results("streaming-defaults" if arguments.defaults else "streaming", rows, "\n".join([__doc__ or "", *lines]))


def _summary(rows: list[dict[str, object]]) -> str:
    def median(key: str) -> float:
        return statistics.median(float(str(row[key])) for row in rows)

    return (
        f"* **{rows[0]['disk_mbps']} MB/s**: {median('edge_run_token_s'):.2f} s a token, {median('of_bound'):.2f} of "
        f"the bound ({median('bound_s'):.2f} s); mmap {median('mmap_token_s'):.2f} s, "
        f"{spread(float(str(row['over_mmap'])) for row in rows)} x slower, {sameness(rows)}; bytes per token "
        f"{median('bytes_over_least'):.3f} of the least possible; readers {median('reader_cpu_s_per_gb'):.3f} CPU s "
        "per GB."
    )


if __name__ == "__main__":
    main()
