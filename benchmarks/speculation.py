"""Speculation against plain decoding and llama.cpp's mmap, on a small device: tokens a second after the prompt.

Dense: the kit model grown to 4 GB (32 layers, Q4_0) under half of it, drafter kit-draft. Mixture of experts: kit-moe
grown to 8 GB (6 layers, F16) under a quarter. In one row, each is run once, in turn, cold, in a control group of the
budget, 128 KiB read-ahead. Where the drive is not limited, its speed changes within minutes: there plain decoding runs
once before and once after, and their mean counts; `--pairs` goes on so, by turns, and the median counts (`ratios`: of
each; `off_change`: the fastest of plain decoding against the slowest). Each continues the same text greedily: a novel,
a grade-school question, text that repeats (summaries and retrieval, look-up alone), or random tokens, which nobody can
guess. `expected` is the gain that the controller expected before each pass, `measured` the one against plain decoding
in the same row. Where tokens differ, `gap` is how far apart the two best logits were there in plain decoding, and
`noise` the largest difference between widths that the run saw.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import statistics
from pathlib import Path
from typing import Any

from _box import RESULTS, ROOT, SHARED, grown_model, grown_moe, need, run_worker, write_results

WORKER = ROOT / "benchmarks" / "_speculation_worker.py"
DRAFT = SHARED / "models" / "kit-draft.gguf"
KEYS = ("model", "disk_mbps", "text", "round")


def main() -> None:
    """Measure one row, and write it among the others of today."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("dense", "moe"), default="dense")
    parser.add_argument("--disk", type=int, default=500, help="MB/s; 0 is not limited")
    parser.add_argument("--text", choices=("novels", "gsm8k", "repeating", "random"), default="novels")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--off-prompts", type=int, help="plain decoding: of the first ones only")
    parser.add_argument("--mmap-tokens", type=int, default=16, help="0 leaves mmap out")
    parser.add_argument("--round", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=1, help="of runs, by turns, where the drive is not limited")
    arguments = parser.parse_args()
    if arguments.pairs > 1 and arguments.disk:
        parser.error("--pairs is for a drive that is not limited: --disk 0")
    need(DRAFT)
    is_dense = arguments.model == "dense"
    model = grown_model("4G", 32) if is_dense else grown_moe("8G")
    budget = model.stat().st_size // (2 if is_dense else 4)
    box, files = {"memory": budget, "disk_mbps": arguments.disk}, [model, DRAFT]
    common = [model, "--memory", budget, "--text", arguments.text, "--tokens", arguments.tokens]
    short = [*common, "--prompts", arguments.off_prompts or arguments.prompts, "--speculate", "off"]
    guessing = ["--speculate", "ngram"] if arguments.text == "repeating" else ["--draft", DRAFT]
    plain, guessed = [run_worker(short, box, files, WORKER)], []
    for _ in range(arguments.pairs):
        guessed.append(run_worker([*common, "--prompts", arguments.prompts, *guessing], box, files, WORKER))
        if not arguments.disk:
            plain.append(run_worker(short, box, files, WORKER))
    speeds = [each["tokens_per_s"] for each in plain]
    beside = [statistics.harmonic_mean(pair) for pair in itertools.pairwise(speeds)] or speeds
    ratios = [each["tokens_per_s"] / speed for each, speed in zip(guessed, beside, strict=True)]
    off, on = plain[0], guessed[0]
    row: dict[str, Any] = {
        "model": arguments.model,
        "disk_mbps": arguments.disk or "unthrottled",
        "text": arguments.text,
        "round": arguments.round,
        "tokens": arguments.tokens * arguments.prompts,
        "off_tokens_per_s": statistics.median(beside),
        "off_change": max(speeds) / min(speeds),
        "on_tokens_per_s": statistics.median(each["tokens_per_s"] for each in guessed),
        "measured": statistics.median(ratios),
        "ratios": " ".join(f"{ratio:.3f}" for ratio in ratios),
    }
    if arguments.mmap_tokens:
        few = ["--tokens", arguments.mmap_tokens, "--prompts", 1, "--backend", "llama.cpp"]
        mmap = run_worker([*short, *few], box, files, WORKER)
        row["mmap_tokens_per_s"] = mmap["tokens_per_s"]
        row["over_mmap"] = row["on_tokens_per_s"] / mmap["tokens_per_s"]
    row |= compared(off, on)
    print(row, flush=True)
    rows = [old for old in _rows_of_today() if any(str(old[key]) != str(row[key]) for key in KEYS)]
    rows = sorted([*rows, row], key=lambda each: [str(each[key]) for key in KEYS])
    write_results("speculation", rows, "\n".join([__doc__ or "", *map(_line, rows)]), replaces=True)


def compared(off: dict[str, Any], on: dict[str, Any]) -> dict[str, Any]:
    """Return what the run with speculation did, and how its tokens compare."""
    speculations = on["speculations"]
    passes = sum(each["passes"] for each in speculations)
    tokens = sum(each["passes"] + each["accepted"] for each in speculations)
    differing = [
        (gap, place)
        for a, b, gaps in zip(off["answers"], on["answers"], off["gaps"], strict=False)
        if (place := next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)) is not None
        for gap in [gaps[place]]
    ]
    widths: dict[str, int] = {}
    for each in speculations:
        for width, count in each["widths"].items():
            widths[width] = widths.get(width, 0) + count
    mean = sum(each["expected_gain"] * each["passes"] for each in speculations) / max(1, passes)
    return {
        "expected": mean,
        "tokens_per_pass": tokens / max(1, passes),
        "expected_tokens_per_pass": sum(s["expected_tokens_per_pass"] * s["passes"] for s in speculations) / passes,
        "plain_token_s": sum(s["plain_token_s"] * s["passes"] for s in speculations) / passes,
        "drafted": sum(each["drafted"] for each in speculations),
        "accepted": sum(each["accepted"] for each in speculations),
        "widths": " ".join(f"{width}:{count}" for width, count in sorted(widths.items(), key=lambda w: int(w[0]))),
        "switched_off_share": sum(each["switched_off_share"] * each["passes"] for each in speculations) / passes,
        "draft_s_per_pass": sum(each["draft_s"] for each in speculations) / max(1, passes),
        "noise": max(each["noise"] for each in speculations),
        "compared": sum(map(len, off["answers"])),
        "differing": len(differing),
        "gap": max((gap for gap, _ in differing), default=0.0),
        "off_bytes_per_token": off["bytes_per_token"],
        "on_bytes_per_token": on["bytes_per_token"],
        "peak_bytes": on["peak_bytes"],
        "budget_bytes": on["budget_bytes"],
        "oom_kills": on["box"]["oom_kills"],
    }


def _rows_of_today() -> list[dict[str, Any]]:
    file = Path(RESULTS) / f"{datetime.date.today():%Y-%m-%d}-speculation.csv"
    if not file.exists():
        return []
    with file.open(newline="") as open_file:
        return list(csv.DictReader(open_file))


def _line(row: dict[str, Any]) -> str:
    over = f", {float(row['over_mmap']):.2f} x mmap" if row.get("over_mmap") else ""
    return (
        f"* **{row['model']}, {row['disk_mbps']}, {row['text']}**: {float(row['on_tokens_per_s']):.2f} tokens/s, "
        f"{float(row['measured']):.2f} x plain decoding (expected {float(row['expected']):.2f}, over "
        f"{row['tokens']} tokens){over}; "
        f"{float(row['tokens_per_pass']):.2f} tokens a pass, {float(row['draft_s_per_pass']):.3f} s of guessing each, "
        f"off in {float(row['switched_off_share']):.0%} of the passes, widths {row['widths']}; peak "
        f"{float(row['peak_bytes']) / float(row['budget_bytes']):.3f} of the budget; texts differ {row['differing']} "
        "times."
    )


if __name__ == "__main__":
    main()
