"""What a draft model gains by the kind of text: a real model on a small device, against llama.cpp's mmap and plain
decoding.

Model: Qwen2.5-Coder 1.5B (CONTRIBUTING.md, Real models), all matrices Q4_0, grown to 5 GiB by layers, which changes no
logit; its draft is Qwen2.5-Coder 0.5B, in the same budget. Budget and control group: half the model. Product's
defaults. Kinds: code, questions, chat, translation and summaries are prompts of Spec-Bench's, with the model's chat
template, cut to 2,000 characters, and prose goes on with 1,000 of a novel; in each round they are others. In each
round every way runs once, in turn, cold. What mmap and plain decoding take for a token does not depend on the text:
both answer the first kind only, with fewer tokens; mmap once with each read-ahead, and its fastest counts. `efficiency`
is the share of the physical limit: the longer of computing and reading, over the time that passed. With `--probe` the
device was measured for both models first (`edge-run probe --model`), and weights are repacked where that was faster.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

from _box import MODELS, NOVELS, ROOT, SPEC_BENCH, need, run_in_box, run_worker, skip, spread, write_results
from _kinds_worker import KINDS

from edge_run.base.units import format_size
from real import READ_AHEADS_KB, find, grown_by_layers, pure_q4_0, same_start
from real_models import QWEN, QWEN_DRAFT, Missing

WORKER = ROOT / "benchmarks" / "_kinds_worker.py"


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=int, default=500, help="MB/s; 0 is not limited")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--few", type=int, default=6, help="tokens of mmap and of plain decoding")
    parser.add_argument("--size", default="5G")
    parser.add_argument("--probe", action="store_true", help="the device first, as `edge-run probe` does")
    arguments = parser.parse_args()
    need(NOVELS, SPEC_BENCH)
    MODELS.mkdir(parents=True, exist_ok=True)
    try:
        published, draft = find(QWEN), find(QWEN_DRAFT)
    except Missing as reason:
        skip(reason)
    model = grown_by_layers(pure_q4_0(published), arguments.size)
    budget = model.stat().st_size // 2
    rows: list[dict[str, Any]] = []
    cache = tempfile.TemporaryDirectory()
    for file in (model, draft) if arguments.probe else ():
        run_in_box([sys.executable, "-m", "edge_run", "probe", "--model", str(file), "--cache-dir", cache.name])
    for number in range(arguments.rounds):

        def run(*flags: object, tokens: int, read_ahead_kb: int = 128, number: int = number) -> dict[str, Any]:
            box = {"memory": budget, "disk_mbps": arguments.disk, "readahead_kb": read_ahead_kb}
            flags = ("--memory", budget, "--number", number, "--tokens", tokens, "--cache", cache.name, *flags)
            return run_worker([model, *flags], box, [model, draft], WORKER)

        def of_mmap(read_ahead_kb: int) -> dict[str, Any]:
            flags = ("--backend", "llama.cpp", "--kinds", KINDS[0])
            return run(*flags, tokens=arguments.few, read_ahead_kb=read_ahead_kb)["rows"][0]

        plain = run("--kinds", KINDS[0], tokens=2 * arguments.few)["rows"][0]
        mmap = {kilobytes: of_mmap(kilobytes) for kilobytes in READ_AHEADS_KB}
        fastest_kb = max(mmap, key=lambda kilobytes: mmap[kilobytes]["tokens_per_s"])
        drafted = run("--draft", draft, tokens=arguments.tokens)
        for row in drafted["rows"]:
            rows.append(
                {
                    **{name: value for name, value in row.items() if name != "answer"},
                    "round": number,
                    "disk_mbps": arguments.disk or "unthrottled",
                    "budget_bytes": budget,
                    "peak_bytes": drafted["peak_bytes"],
                    "repacked": drafted["repacked"],
                    "oom_kills": drafted["box"]["oom_kills"],
                    "plain_tokens_per_s": plain["tokens_per_s"],
                    "plain_efficiency": plain["efficiency"],
                    "mmap_tokens_per_s": mmap[fastest_kb]["tokens_per_s"],
                    "mmap_read_ahead_kb": fastest_kb,
                    "over_mmap": row["tokens_per_s"] / mmap[fastest_kb]["tokens_per_s"],
                    "over_plain": row["tokens_per_s"] / plain["tokens_per_s"],
                    "plain_over_mmap": plain["tokens_per_s"] / mmap[fastest_kb]["tokens_per_s"],
                    "is_same": same_start({"answers": [plain["answer"]]}, {"answers": [mmap[fastest_kb]["answer"]]})
                    and (
                        row["kind"] != KINDS[0]
                        or same_start({"answers": [plain["answer"]]}, {"answers": [row["answer"]]})
                    ),
                }
            )
            print(rows[-1], flush=True)
    cache.cleanup()
    name = f"kinds-{arguments.disk or 'unthrottled'}{'-probed' * arguments.probe}"
    write_results(name, rows, "\n\n".join([__doc__.strip(), finding(rows, format_size(model.stat().st_size))]))


def finding(rows: list[dict[str, Any]], size: str) -> str:
    """Return what the rounds say, by kind and over all of them."""
    lines = [
        "| kind | tokens/s | over mmap | over plain | tokens a pass | efficiency |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        some = [row for row in rows if row["kind"] == kind]
        cells = (
            spread([row[key] for row in some])
            for key in ("tokens_per_s", "over_mmap", "over_plain", "tokens_per_pass", "efficiency")
        )
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    every = [row["over_mmap"] for row in rows]
    same = "the same tokens" if all(row["is_same"] for row in rows) else "OTHER TOKENS"
    plain, plain_over = (spread([row[key] for row in rows]) for key in ("plain_tokens_per_s", "plain_over_mmap"))
    peak = max(row["peak_bytes"] / row["budget_bytes"] for row in rows)
    return "\n".join(lines) + (
        f"\n\nModel of {size}, budget {format_size(rows[0]['budget_bytes'])}, drive {rows[0]['disk_mbps']} MB/s: over "
        f"mmap {spread(every)}, all kinds and rounds; plain decoding {plain} tokens/s, {plain_over} x mmap ({same}); "
        f"peak {peak:.3f} of the budget. Repacked: {rows[0]['repacked'] or 'nothing'}."
    )


if __name__ == "__main__":
    main()
