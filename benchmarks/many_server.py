"""Sixteen answers at once from `edge-run serve` and from llama-server, in the same box.

    many_server.py MODEL --peer LLAMA-SERVER [--memory 2.5GiB] [--mbps 500 0] [--rounds 3] [--mixed]

All requests come at once, in llama-server's own words, greedy, and none ends early. In each round each server runs
once, in turn, cold, in a box with the memory and the drive. `steady` are the tokens a second while all are being
answered; with `--mixed`, every second request is a long prompt with a short answer, and `tokens/s` counts all tokens,
those of prompts too, until the last answer. `packed` is edge-run with the file that `edge-run pack` writes. `default`
and `tuned` are llama-server as `goodput.py` starts it; its default has four slots, so that it answers four requests at
a time. `slots` has as many as there are requests, each with cells of its own, and is its defaults else: its fastest
where the model fits. `--memory` beyond twice the model's size is for a model that fits; below, llama-server repacks no
weights. Its mmap reads as far ahead as `--readahead-kb` says; edge-run reads past the page cache. An answer that did
not come to its end (`whole`) is in no figure, and where there is one nothing is steady.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _box import READAHEAD_KB, file_at, program_at, spread, write_results
from _http_load import ask_at
from goodput import TOKENS, Request, prediction, serving

from edge_run.base.units import format_size, parse_size

OURS, SERVERS = ("edge-run", "packed"), ("edge-run", "packed", "default", "tuned", "slots")
LONGEST_S = 3600.0


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=file_at)
    parser.add_argument("--peer", type=program_at, required=True, help="llama-server")
    parser.add_argument("--memory", default="2.5GiB")
    parser.add_argument("--mbps", type=int, nargs="+", default=[500, 0], help="0: no limit")
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--long-prompt", type=int, default=400)
    parser.add_argument("--short-answer", type=int, default=8)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--readahead-kb", type=int, default=READAHEAD_KB, help="of the drive")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=SERVERS, default=("edge-run", "default", "tuned"))
    parser.add_argument("--cache", type=Path, help="where edge-run keeps what it measured; none: measured first")
    parser.add_argument("--name", default="many-server")
    given = parser.parse_args()
    given.context = given.parallel * (max(given.prompt + given.tokens, given.long_prompt + given.short_answer) + 16)
    drives, rows = given.mbps, list[dict[str, Any]]()
    with contextlib.ExitStack() as ending:
        cache = given.cache or Path(ending.enter_context(tempfile.TemporaryDirectory()))
        given.packed = given.model.with_name(f"{given.model.stem}.many-server-packed")  # on the drive of the model
        ending.callback(given.packed.unlink, missing_ok=True)
        for given.mbps in drives:
            prediction(given, cache)
            if "packed" in given.only and not given.packed.exists():
                pack = [sys.executable, "-m", "edge_run", "pack", given.model, "-o", given.packed]
                subprocess.run(list(map(str, pack)), check=True, stdout=subprocess.DEVNULL)
            for number in range(given.rounds):
                for server in given.only[::-1] if number % 2 else given.only:
                    rows.append(
                        {"mbps": given.mbps, "round": number, "server": server, **measured(given, cache, server)}
                    )
                    print(rows[-1], flush=True)
    write_results(given.name, rows, f"{(__doc__ or '').strip()}\n\n{told(given, rows)}")


def requests(given: argparse.Namespace) -> list[Request]:
    """Return what is asked, all at once."""
    chance, made = random.Random(1), list[Request]()
    for number in range(given.parallel):
        is_long = given.mixed and number % 2
        prompt, tokens = (given.long_prompt, given.short_answer) if is_long else (given.prompt, given.tokens)
        made.append((0.0, chance.choices(TOKENS, k=prompt), tokens))
    return made


def measured(given: argparse.Namespace, cache: Path, server: str) -> dict[str, Any]:
    """Return how fast a server answers."""
    asked = requests(given)
    with serving(server, given, cache) as (port, found):
        answers = ask_at("127.0.0.1", port, asked, LONGEST_S, cache_prompt=False)
    ends = [answer.moments[-1][0] for answer in answers if answer.is_whole]
    firsts = [answer.moments[0][0] for answer in answers if answer.moments]
    began_s = min(answer.asked_s for answer in answers)
    after_s, until_s = (max(firsts), min(ends)) if len(ends) == len(answers) else (0.0, 0.0)
    steady = sum(n for answer in answers for moment, n in answer.moments if after_s < moment <= until_s)
    done = [(answer, len(prompt)) for answer, (_, prompt, _) in zip(answers, asked, strict=True) if answer.is_whole]
    n_tokens = sum(answer.tokens + n_prompt * given.mixed for answer, n_prompt in done)
    wall_s = max(ends) - began_s if ends else 0.0
    return {
        "whole": len(ends),
        "tokens_per_s": n_tokens / wall_s if wall_s else 0.0,
        "steady_tokens_per_s": steady / (until_s - after_s) if until_s > after_s else 0.0,
        "peak_bytes": found["peak_bytes"],
        "oom_kills": found["oom_kills"],
        "read_bytes": found["read_bytes"],
    }


def told(given: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    """Return the rows for a reader, and how edge-run compares with the others in each round."""
    size = format_size(given.model.stat().st_size)
    lines = [
        f"{given.model.name} ({size}) in {format_size(parse_size(given.memory))}, {given.parallel} requests at once, "
        f"prompts of {given.prompt} and answers of {given.tokens} tokens"
        f"{f', every second {given.long_prompt} and {given.short_answer}' if given.mixed else ''}; "
        f"{given.threads} threads, {given.readahead_kb} KiB of read-ahead."
    ]
    lines += ["", "| MB/s | server | whole | tokens/s | spread | steady | spread |", "|---|---|---|---|---|---|---|"]
    for mbps, server in dict.fromkeys((row["mbps"], row["server"]) for row in rows):
        some = [row for row in rows if (row["mbps"], row["server"]) == (mbps, server)]
        cells = [str(mbps or "no limit"), server, str(min(row["whole"] for row in some))]
        for key in ("tokens_per_s", "steady_tokens_per_s"):
            found = sorted(row[key] for row in some)
            cells += [f"{statistics.median(found):.2f}", f"{found[0]:.2f} to {found[-1]:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    for mbps in dict.fromkeys(row["mbps"] for row in rows):
        for ours, other in itertools.product(OURS, SERVERS[2:]):
            ratios = compared(rows, mbps, ours, other, "tokens_per_s" if given.mixed else "steady_tokens_per_s")
            if ratios:
                where = f"{mbps} MB/s" if mbps else "no limit"
                of = "" if len(ratios) == given.rounds else f", in {len(ratios)} of {given.rounds} rounds"
                lines += ["", f"* {where}, {ours} against {other}: {spread(ratios)} times{of}."]
    return "\n".join(lines)


def compared(rows: list[dict[str, Any]], mbps: int, ours: str, other: str, key: str) -> list[float]:
    """Return the rate of `ours` over another server's, of each round, in order, where both ran."""
    of = {(row["server"], row["round"]): row[key] for row in rows if row["mbps"] == mbps}
    pairs = [(of.get((ours, number)), rate) for (server, number), rate in of.items() if server == other]
    return sorted(rate / theirs for rate, theirs in pairs if rate is not None and theirs)


if __name__ == "__main__":
    main()
