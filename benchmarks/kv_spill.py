"""A text that is longer than memory has room for: what is held, written and read while it grows.

A model is given more and more of a text, and continues it for some tokens at each length, under a budget in which the
keys and values of all of it have no room. The budget is compared with the most that the process held, what was written
with the new keys and values, and what a token read with what the plan says.

    kv_spill.py --model MODEL.gguf --text FILE [--memory 900MiB] [--context 32768] [--lengths 4096,16384,32700]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from _box import write_results
from _usage import used_s

from edge_run import Model
from edge_run.base.units import MIB, format_size

N_ANSWER = 8


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="is repeated where it is too short")
    parser.add_argument("--memory", default="900MiB")
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--lengths", default="1024,4096,8192,16384,32700")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-ub", type=int, default=256)
    parser.add_argument("--kv-spill", default="on")
    parser.add_argument("--name", default="kv-spill")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    options: dict[str, Any] = {
        "memory": arguments.memory,
        "context_tokens": arguments.context,
        "threads": arguments.threads,
        "micro_batch_tokens": arguments.ub,
    }
    text = arguments.text.read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = []
    with Model(arguments.model, kv_spill=arguments.kv_spill, **options) as model:
        tokens = model.tokenize(text[: 6 * lengths[-1]])
        tokens = (tokens * (1 + lengths[-1] // len(tokens)))[: lengths[-1]]
        plan = model.plan
        planned = {point.tokens: point for point in plan.by_context}
        print(plan, flush=True)
        for length in lengths:
            if length + N_ANSWER > plan.context_tokens:
                break
            began, used = time.monotonic(), used_s()
            done = model.generate(tokens[:length], max_tokens=N_ANSWER, temperature=0).result()
            spill, held = done.kv_spill, done.memory
            row = {
                "tokens": length,
                "seconds": round(time.monotonic() - began, 1),
                "cpu_s": round(used_s() - used, 1),
                "peak_bytes": held.peak_bytes,
                "budget_bytes": held.budget_bytes,
                "read_bytes_per_token": round(done.io.bytes_per_token),
                "planned_bytes_per_token": sum(
                    (planned[length].streamed_bytes_per_pass, planned[length].kv_bytes_per_pass)
                )
                if length in planned
                else 0,
                "decode_tokens_per_s": round(done.decode_tokens_per_s, 3),
                "efficiency": round(done.io.efficiency, 3),
                "written_bytes": spill.written_bytes if spill else 0,
                "kv_read_bytes": spill.read_bytes if spill else 0,
                "away_bytes": spill.away_bytes if spill else 0,
                "answer": done.text,
            }
            rows.append(row)
            print(row, flush=True)
        written, away = rows[-1]["written_bytes"], rows[-1]["away_bytes"]
    lines = [
        "| tokens | seconds | held at most | away | written | read per token | tokens/s | efficiency |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes = (format_size(row[key]) for key in ("peak_bytes", "away_bytes", "written_bytes", "read_bytes_per_token"))
        lines.append(
            f"| {row['tokens']:,} | {row['seconds']} | {' | '.join(sizes)} | {row['decode_tokens_per_s']} | "
            f"{row['efficiency']} |"
        )
    peak = max(row["peak_bytes"] for row in rows)
    finding = (
        f"{arguments.model.name}, {arguments.memory}, a context of {arguments.context:,} tokens of which "
        f"{plan.context_tokens:,} were promised; -ub {arguments.ub}, {arguments.threads} threads, --kv-spill "
        f"{arguments.kv_spill}.\n\n" + "\n".join(lines) + "\n\n"
        f"At most {format_size(peak)} were held, {(plan.budget_bytes - peak) / MIB:.0f} MiB less than the budget. "
        f"{written / away if away else 0:.3f} bytes were written for each that is away at the end."
    )
    write_results(arguments.name, rows, finding)


if __name__ == "__main__":
    main()
