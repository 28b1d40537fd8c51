"""What of a token is not llama.cpp's: Python with the callback, copies of logits, and sampling, by CPU seconds.

    shares.py MODEL.gguf ... [--rounds 5] [--tokens 128] [--threads 2] [--streamed 0.6] [--answers 1 16]

Counted are the CPU seconds of the thread that makes the text, which computes as llama.cpp's first thread: in
`llama_decode` without the callback, but with the products that it has llama.cpp compute; in the callback; in the
samplers (default settings, on the whole vocabulary); and the rest, which is Python. The clock is that of the thread, so
that others at work hardly change the shares. Each model runs all in memory, and with `--streamed` in a budget of that
share of its file. `python` has the callback and the copies of logits in it. Shares are of these CPU seconds where all
is in memory; of a pass that streams they are of the time that goes by, in which the thread also waits for the drive.
With `--answers` several share each pass. Reach: Python 1 % in memory, and 2 % of passes that take 200 ms or more (3 %
with 16 answers); sampling 3 % for one answer, over the 151,936 tokens of Qwen's vocabulary.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from _box import file_at, run_worker, write_results

WORKER = Path(__file__).with_name("_shares_worker.py")
LEAST_PASS_S = 0.2


def describe(model: Path, streamed: float, rows: list[dict[str, Any]]) -> str:
    """Return the medians of some runs, as a row of a table."""
    of, what = ("pass_s", f"{streamed:.0%} of it") if streamed else ("main_s", "in memory")

    def share(key: str) -> str:
        return f"{statistics.median(row[key] / max(row[of], LEAST_PASS_S * bool(streamed)) for row in rows):.2%}"

    median = {key: statistics.median(row[key] for row in rows) for key in rows[0] if key.endswith("_s")}
    shares = " | ".join(share(key) for key in ("python_s", "callback_s", "copy_s", "sampling_s"))
    what = f"{model.name}, {what} ({rows[0]['mode']}) | {rows[0]['answers']}"
    return (
        f"| {what} | {1e3 * median['pass_s']:.0f} | {1e3 * median['main_s']:.1f} | {1e3 * median['python_s']:.2f} | "
        f"{shares} |"
    )


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=file_at)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--answers", type=int, nargs="+", default=[1])
    parser.add_argument("--streamed", type=float, default=0.0, help="also in a budget of this share of the file")
    parser.add_argument("--disk", type=int, default=0, help="MB/s for runs that stream; 0 is not limited")
    parser.add_argument("--print-only", action="store_true", help="write no results")
    arguments = parser.parse_args()
    shares = [0.0, arguments.streamed] if arguments.streamed else [0.0]
    ways = [(share, answers) for share in shares for answers in arguments.answers]
    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for model in arguments.models:
            for share, answers in ways:
                flags: list[object] = [model, "--tokens", arguments.tokens, "--threads", arguments.threads]
                flags += ["--answers", answers, *(["--memory", int(share * model.stat().st_size)] if share else [])]
                box = {"disk_mbps": arguments.disk} if share and arguments.disk else None
                figures = run_worker(flags, box, model if box else None, WORKER)
                figures.pop("box", None)
                rows.append({"model": model.name, "share": share, "round": number, **figures})
                print(rows[-1], flush=True)
    table = [
        "| | answers | pass, ms | CPU, ms | Python, ms | Python | callback | copies | sampling |",
        "|---" * 9 + "|",
    ]
    for model in arguments.models:
        for share, answers in ways:
            mine = [row for row in rows if (row["model"], row["share"], row["answers"]) == (model.name, share, answers)]
            table.append(describe(model, share, mine))
    finding = "\n".join([__doc__ or "", *table])
    print(finding)
    if not arguments.print_only:
        write_results("shares", rows, finding)


if __name__ == "__main__":
    main()
