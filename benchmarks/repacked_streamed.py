"""What repacked weights gain and cost where they stream: a prompt, passes of 32 tokens as guesses are verified in, and
single tokens.

    repacked_streamed.py MODEL.gguf [--share 0.5] [--rounds 3] [--prompt 2000] [--packed MODEL.packed]

The budget is a share of the model's weights, and the drive is not limited. In each round every way runs once, in turn,
cold, in a control group of the budget: `off`; `on`, where readers repack what they have read; with `--packed` also from
a packed file (`edge-run pack`), where nothing is left to repack; and `auto`, which may be either. A prompt is read
once, passes of 32 tokens are those of a prompt that is read a second time, single tokens follow the long prompt.

A pass takes at least what computing it takes where the whole model is in memory, and at least what reading its bytes
takes where nothing else is done: the longer of the two is its limit, and what `off`'s is over another way's is as much
as that way could gain.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from _box import file_at, run_worker, spread, write_results

VERIFIED, PASSES, TOKENS = 32, 8, 12
READ_MIB = 1024  # at full speed, with nothing beside it
WHAT = {
    "prompt_s": "the prompt",
    "pass_s": f"a pass of {VERIFIED}",
    "pass_limit_s": "its limit",
    "token_s": "a token",
}


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=file_at)
    parser.add_argument("--share", type=float, default=0.5, help="of the model, as the budget")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens")
    parser.add_argument("--packed", type=file_at)
    parser.add_argument("--print-only", action="store_true", help="write no results: the machine is not quiet")
    arguments = parser.parse_args()
    ways: dict[str, list[object]] = {way: ["--repack", way, "--packed", "off"] for way in ("off", "on", "auto")}
    if arguments.packed:
        ways["on, packed"] = ["--repack", "on", "--packed", arguments.packed]
    memory = round(arguments.share * arguments.model.stat().st_size)
    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for way, flags in ways.items():
            common, box = [arguments.model, "--memory", memory, *flags], {"memory": memory, "disk_mbps": None}
            long = ["--prompt", arguments.prompt, "--context", arguments.prompt + 64, "--micro-batch", 512]
            verified = VERIFIED * PASSES
            short = ["--prompt", verified, "--context", verified + 64, "--micro-batch", VERIFIED, "--again"]
            read = run_worker([*common, *long, "--decode", TOKENS], box, arguments.model)
            alone = ["--decode", "2", "--direct-read", READ_MIB]
            passes = run_worker([*common, *short, *alone], box, arguments.model)
            whole = run_worker([arguments.model, *flags, *short, "--decode", "2"])
            row = {"round": number, "way": way, "repacked": " ".join(read["repacked"])}
            row |= {"pass_repacked": " ".join(passes["repacked"])}
            row |= {"prompt_s": read["prompt_s"], "pass_s": passes["prompt_again_s"] / PASSES}
            row |= {"compute_s": whole["prompt_again_s"] / PASSES}
            row |= {"reading_s": passes["bytes_per_token"] / passes["direct_bytes_per_s"]}
            row |= {"pass_limit_s": max(row["compute_s"], row["reading_s"])}
            row |= {"token_s": read["mean_token_s"], "bytes_per_token": read["bytes_per_token"]}
            boxes = read["box"], passes["box"]
            row |= {"memory_bytes": memory, "peak_bytes": max(box["peak_bytes"] or 0 for box in boxes)}
            rows.append(row | {"oom_kills": sum(box["oom_kills"] for box in boxes)})
            print(rows[-1], flush=True)
    finding = f"{__doc__}\n{describe(rows, arguments)}"
    print(finding)
    if not arguments.print_only:
        write_results("repacked-streamed", rows, finding)


def describe(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """Return a table: of each way the seconds, and how many times as fast as `off` of the same round."""
    plain = [row for row in rows if row["way"] == "off"]
    names = "".join(f" {name}: seconds | times `off` |" for name in WHAT.values())
    lines = [
        f"{arguments.model.name}, {arguments.share:.0%} of it as the budget, {arguments.prompt:,} tokens",
        "",
        f"| | repacked |{names}",
        "|---" * (2 + 2 * len(WHAT)) + "|",
    ]
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == way]
        kinds = dict.fromkeys(row[key] or "nothing" for key in ("repacked", "pass_repacked") for row in mine)
        cells = [way, "; ".join(kinds)]
        for figure in WHAT:
            times = (before[figure] / row[figure] for before, row in zip(plain, mine, strict=True))
            cells += [spread(row[figure] for row in mine), spread(times)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
