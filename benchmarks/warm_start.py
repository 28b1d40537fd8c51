"""A second start of a model that fits: from a new process to its first token, against llama.cpp's warm start.

Both read a file that lies in the page cache: llama.cpp maps it, edge-run copies it from there. In each round one after
the other, each in a process of its own, with the width of passes, the context and the threads given: opening, and the
first token after a prompt of 16 tokens. Python and its modules are loaded before. The first run of each is not counted,
since it may find the file on the drive. The time of edge-run over that of llama.cpp is to be 1.1 at most.
"""

from __future__ import annotations

import argparse
import statistics

from _box import file_at, grown_model, run_worker, sameness, spread, write_results


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", type=file_at, help="another model than the kit model grown to 1 GB")
    arguments = parser.parse_args()
    model = arguments.model or grown_model("1G", 16)
    rows = []
    for number in range(arguments.rounds + 1):
        ours = run_worker([model, "--decode", 1])
        plain = run_worker([model, "--decode", 1, "--backend", "llama.cpp"])
        off = run_worker([model, "--decode", 1, "--page-cache", "off"])
        times = {
            name: run["load_s"] + run["prompt_s"] for name, run in (("ours", ours), ("plain", plain), ("off", off))
        }
        rows.append(
            {
                "round": number,
                "edge_run_s": times["ours"],
                "llama_cpp_s": times["plain"],
                "without_page_cache_s": times["off"],
                "ratio": times["ours"] / times["plain"],
                "edge_run_open_s": ours["load_s"],
                "llama_cpp_open_s": plain["load_s"],
                "cached_share": ours["cached_share"],
                "same_token": ours["last_token"] == plain["last_token"],
            }
        )
        print(rows[-1], flush=True)
    counted = rows[1:]
    ours_s, plain_s, off_s = (
        statistics.median(float(str(row[key])) for row in counted)
        for key in ("edge_run_s", "llama_cpp_s", "without_page_cache_s")
    )
    ratio = spread(float(str(row["ratio"])) for row in counted)
    finding = (
        f"{__doc__}\n* {model.name}: first token after {ours_s:.2f} s, llama.cpp {plain_s:.2f} s: {ratio} of it, "
        f"{sameness(counted)}; read from the drive as before {off_s:.2f} s."
    )
    write_results("warm-start", rows, finding)


if __name__ == "__main__":
    main()
