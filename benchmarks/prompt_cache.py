"""What the prompt cache saves: a long prompt again, and another question after the same system prompt.

Each prompt is read by a model that has just been opened, without the cache, with an empty one (which it fills), and
with a full one, in turn; seconds to the first token, opening excluded, and the processor's (user and system, all
threads). What a full cache saves is compared with the time to read its files at the drive's speed and with one pass.
The tokens are arbitrary, and the logits' best tokens must be the same in all three.
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
from _box import write_results

from edge_run import Model

N_ANSWER = 4


def used_s() -> float:
    """Return the processor's seconds of this process so far."""
    times = os.times()
    return times.user + times.system


def measure(path: Path, prompt: Sequence[int], cache: Path | str, options: dict[str, Any]) -> dict[str, Any]:
    """Return what a prompt took in a model of its own."""
    with Model(path, prompt_cache=cache, **options) as model:
        # The weights are read by then: what is timed is the prompt.
        model.generate([1, 2], max_tokens=1, temperature=0).result()
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=3000)
    parser.add_argument("--shared", type=int, default=2000, help="tokens of the system prompt that two chats share")
    parser.add_argument("--question", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-ub", type=int, default=64)
    parser.add_argument("--only", choices=("prompt", "chat"))
    parser.add_argument("--exact", action="store_true")
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
                ("question alone, no cache", questions[1], none),
            ]
            plan = [one for one in plan if not arguments.only or (arguments.only == "prompt") == ("prompt" in one[0])]
            answers: dict[str, tuple[int, ...]] = {}
            for what, prompt, cache in plan:
                found = measure(arguments.model, prompt, cache, options)
                kind = what.partition(",")[0]
                assert answers.setdefault(kind, found["tokens"]) == found["tokens"], what
                row = {"round": number, "what": what, "prompt_tokens": len(prompt), **found}
                if cache is not none:
                    row["cache_bytes"], row["read_s"] = read_speed(Path(cache))
                del row["tokens"]
                rows.append(row)
                print(row, flush=True)
    names = dict.fromkeys(row["what"] for row in rows)
    lines = ["| prompt | from the cache | first token | processor |", "|---|---|---|---|"]
    for name in names:
        own = [row for row in rows if row["what"] == name]
        seconds, cpu = ([row[key] for row in own] for key in ("ttft_s", "cpu_s"))
        lines.append(
            f"| {name} | {own[0]['cached_tokens']} of {own[0]['prompt_tokens']} | {statistics.median(seconds):.2f} s "
            f"({min(seconds):.2f} to {max(seconds):.2f}) | {statistics.median(cpu):.2f} s |"
        )
    text = f"{arguments.model.name}, -ub {arguments.ub}, {arguments.threads} threads, exact {arguments.exact}; "
    text += f"{arguments.rounds} rounds, medians.\n\n" + "\n".join(lines)
    write_results("prompt-cache", rows, text)


if __name__ == "__main__":
    main()
