"""A prompt of 2,000 tokens on a small device: against the limit, and against llama.cpp's mmap.

Model: the kit model grown to 1 GB (64 layers, Q4_0). Budget and cgroup: half the model; disk 500 MB/s; micro-batches of
128 tokens; cold, so the first pass reads all of the model. Interleaved in each round: edge-run and mmap in the same box
with 128 KiB read-ahead, and compute alone: the same prompt with the model all resident, fed a second time. The bound is
max(compute alone, bytes read during the prompt / bandwidth of plain direct reads in the same run).
"""

from __future__ import annotations

import argparse
import statistics

from _box import grown_model, run_worker, sameness, spread, write_results


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--size", default="1G")
    parser.add_argument("--prompt", type=int, default=2000)
    arguments = parser.parse_args()
    model = grown_model(arguments.size, 64)
    budget = model.stat().st_size // 2
    flags = ["--prompt", arguments.prompt, "--context", 2304, "--micro-batch", 128, "--decode", 1, "--warm", 0]
    rows = []
    for number in range(arguments.rounds):
        box = {"memory": budget, "disk_mbps": 500}
        ours = run_worker([model, "--memory", budget, "--direct-read", 512, *flags], box, model)
        mmap = run_worker([model, "--backend", "llama.cpp", *flags], box, model)
        alone = run_worker([model, "--again", *flags])
        read_s = ours["prompt_bytes"] / ours["direct_bytes_per_s"]
        bound_s = max(alone["prompt_again_s"], read_s)
        rows.append(
            {
                "round": number,
                "edge_run_s": ours["prompt_s"],
                "mmap_s": mmap["prompt_s"],
                "compute_alone_s": alone["prompt_again_s"],
                "reading_s": read_s,
                "of_bound": bound_s / ours["prompt_s"],
                "over_mmap": mmap["prompt_s"] / ours["prompt_s"],
                "tokens_per_s": arguments.prompt / ours["prompt_s"],
                "peak_bytes": ours["peak_bytes"],
                "budget_bytes": budget,
                "same_token": ours["last_token"] == mmap["last_token"] == alone["last_token"],
            }
        )
        print(rows[-1], flush=True)
    of_bound, over = (spread(row[key] for row in rows) for key in ("of_bound", "over_mmap"))
    names = ("edge_run_s", "mmap_s", "compute_alone_s", "reading_s")
    seconds = {key: statistics.median(row[key] for row in rows) for key in names}
    write_results(
        "prefill",
        rows,
        f"{__doc__}\n* edge-run {seconds['edge_run_s']:.1f} s, {of_bound} of the bound (compute alone "
        f"{seconds['compute_alone_s']:.1f} s, reading {seconds['reading_s']:.1f} s); mmap {seconds['mmap_s']:.1f} s, "
        f"{over} x as long, {sameness(rows)}.",
    )


if __name__ == "__main__":
    main()
