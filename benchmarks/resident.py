"""A model that fits the budget: tokens per second against llama.cpp with the same kernels, interleaved.

Model: the kit model grown to 1 GB. Both sides have everything in memory (llama.cpp's mapping is read once before), no
box.
"""

from __future__ import annotations

import argparse
import statistics

from _box import grown_model, run_worker, write_results


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode", type=int, default=24)
    arguments = parser.parse_args()
    model = grown_model("1G", 16)
    rows = []
    for number in range(arguments.rounds):
        flags = [model, "--decode", arguments.decode, "--warm", 4]
        ours, plain = run_worker(flags), run_worker([*flags, "--backend", "llama.cpp"])
        rows.append(
            {
                "round": number,
                "mode": ours["mode"],
                "edge_run_token_s": ours["token_s"],
                "llama_cpp_token_s": plain["token_s"],
                "speed_ratio": plain["token_s"] / ours["token_s"],
                "same_token": ours["last_token"] == plain["last_token"],
            }
        )
        print(rows[-1], flush=True)
    ratios = sorted(row["speed_ratio"] for row in rows)
    finding = (
        f"{__doc__}\n* edge-run is {statistics.median(ratios):.3f} times as fast as llama.cpp "
        f"(spread {ratios[0]:.3f} to {ratios[-1]:.3f} over {len(ratios)} rounds)."
    )
    write_results("resident", rows, finding)


if __name__ == "__main__":
    main()
