"""What the prompt cache saves: a long prompt again, and another question after the same system prompt.

    prompt_cache.py --model MODEL [--prompt 3073] [--shared 2048] [-ub 512] [--rounds 3]

Each prompt is read by a model that has just been opened, without the cache, with an empty one (which it fills), and
with a full one, in turn; seconds to the first token, opening excluded, and the processor's (user and system, all
threads). What a full cache saves is compared with the time to read its files at the drive's speed and with one pass.
The tokens are arbitrary, and the logits' best tokens must be the same in all three. What comes after the last whole
block, and the last whole pass, is computed again each time; by default there is one such token. A question after a
system prompt looks at all of it, wherever that comes from: `in memory` is the same question where it was read before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _box import spread, write_results
from _usage import used_s

from edge_run import Model

N_ANSWER, ALONE = 4, "question alone, no cache"


def measure(
    path: Path, prompt: Sequence[int], cache: Path | str, options: dict[str, Any], before: Sequence[int] = (1, 2)
) -> dict[str, Any]:
    """Return what a prompt took in a model of its own, which has read `before`."""
    with Model(path, prompt_cache=cache, **options) as model:
        # The weights are read by then: what is timed is the prompt.
        model.generate(before, max_tokens=1, temperature=0).result()
        used, began = used_s(), time.monotonic()
        answer = model.generate(prompt, max_tokens=N_ANSWER, temperature=0)
        next(iter(answer))
        ttft_s, ttft_cpu_s = time.monotonic() - began, used_s() - used
        done = answer.result()
    return {
        "ttft_s": ttft_s,
        "cpu_s": ttft_cpu_s,
        "cached_tokens": done.cached_tokens,
        "token_s": 1 / done.decode_tokens_per_s if done.decode_tokens_per_s else 0.0,
        "tokens": done.token_ids,
    }


def read_speed(folder: Path) -> tuple[int, float]:
    """Return the bytes of the files in `folder`, and the seconds that reading them takes with nothing cached."""
    files = list(folder.rglob("*.rows"))
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    began, total = time.monotonic(), 0
    for file in files:
        with file.open("rb", buffering=0) as one:
            while piece := one.read(1 << 20):
                total += len(piece)
    return total, time.monotonic() - began


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=3073)
    parser.add_argument("--shared", type=int, default=2048, help="tokens of the system prompt that two chats share")
    parser.add_argument("--question", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-ub", type=int, default=512)
    parser.add_argument("--only", choices=("prompt", "chat"))
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--name", default="prompt-cache")
    arguments = parser.parse_args()
    options: dict[str, Any] = {
        "context_tokens": 4096,
        "threads": arguments.threads,
        "micro_batch_tokens": arguments.ub,
        "exact": arguments.exact,
    }
    tokens = np.random.default_rng(0).integers(1000, 20000, 3 * arguments.prompt).tolist()
    system = tokens[-arguments.shared :]
    questions = [tokens[i * arguments.question : (i + 1) * arguments.question] for i in range(2)]
    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory(dir=Path.home()) as name:
            long, shared, none = Path(name, "long"), Path(name, "shared"), "off"
            plan: list[tuple[str, Sequence[int], Path | str]] = [
                ("prompt, no cache", tokens[: arguments.prompt], none),
                ("prompt, empty cache", tokens[: arguments.prompt], long),
                ("prompt, full cache", tokens[: arguments.prompt], long),
                ("first chat, empty cache", [*system, *questions[0]], shared),
                ("second chat, no cache", [*system, *questions[1]], none),
                ("second chat, full cache", [*system, *questions[1]], shared),
                ("second chat, in memory", [*system, *questions[1]], none),
                (ALONE, questions[1], none),
            ]
            plan = [one for one in plan if not arguments.only or (arguments.only == "prompt") == ("prompt" in one[0])]
            answers: dict[str, tuple[int, ...]] = {}
            for what, prompt, cache in plan:
                read = system if "in memory" in what else (1, 2)
                found = measure(arguments.model, prompt, cache, options, read)
                kind = what.partition(",")[0]
                assert answers.setdefault(kind, found["tokens"]) == found["tokens"], what
                row = {"round": number, "what": what, "prompt_tokens": len(prompt), **found}
                if cache is not none:
                    row["cache_bytes"], row["read_s"] = read_speed(Path(cache))
                del row["tokens"]
                rows.append(row)
                print(row, flush=True)
    text = f"{arguments.model.name}, -ub {arguments.ub}, {arguments.threads} threads, exact {arguments.exact}; "
    text += f"{arguments.rounds} rounds, medians.\n\n{told(rows)}"
    write_results(arguments.name, rows, text)


def told(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows for a reader, and what a full cache saves, in the worst round."""
    lines = ["| prompt | from the cache | first token | processor |", "|---|---|---|---|"]
    by_name = {name: [row for row in rows if row["what"] == name] for name in dict.fromkeys(r["what"] for r in rows)}
    for name, own in by_name.items():
        seconds, cpu = ([row[key] for row in own] for key in ("ttft_s", "cpu_s"))
        lines.append(
            f"| {name} | {own[0]['cached_tokens']} of {own[0]['prompt_tokens']} | {spread(seconds)} s | "
            f"{statistics.median(cpu):.2f} s |"
        )
    if resumed := by_name.get("prompt, full cache"):
        without = by_name["prompt, no cache"]
        gains = [a["ttft_s"] / b["ttft_s"] for a, b in zip(without, resumed, strict=True)]
        limits = [row["ttft_s"] / (1.1 * row["read_s"] + row["token_s"] + 0.05) for row in resumed]
        lines += ["", f"* A prompt that is kept: at least {min(gains):.0f} times sooner (reach 20), and at most"]
        lines += [f"  {max(limits):.2f} of 1.1 times the reading, one pass and 50 ms (reach 1)."]
    if second := by_name.get("second chat, full cache"):
        lines.append("")
        for what, name in (("in memory, as if the chat went on", "second chat, in memory"), ("left out", ALONE)):
            ratios = [a["ttft_s"] / b["ttft_s"] for a, b in zip(second, by_name[name], strict=True)]
            lines.append(f"* A second chat: at most {max(ratios):.2f} times as long as with the system prompt {what}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
