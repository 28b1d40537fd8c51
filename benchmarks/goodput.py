"""Requests that are answered in time, by `edge-run serve` and by llama-server, on a small machine with a slow drive.

    python benchmarks/goodput.py MODEL --peer LLAMA-SERVER [--rates 2 4 8] [--minutes 6] [--only edge-run ...] [--go-on]

Lengths of prompts and answers, and the times between requests, are those of the conversations in the Azure trace of
2023, scaled: lengths by `--lengths`, times so that `--rates` requests come in a minute. Each server runs alone in a box
(memory, drive), cold, and is asked the same. A request is in time where its first token is there within 60 s, and none
of the following takes longer than twice the pass that edge-run predicts for that many answers at once. Goodput is how
many of these come in a minute, and counts for the rate at which a server has most. `--go-on` adds other rates to what
was measured on the same day.

`default` is llama-server as it starts, but for repacked weights and a cache of prompts beside the model, with which it
is killed for want of memory where the model does not fit; `tuned` has as many slots as edge-run has answers at once,
and passes of 128 tokens.

With `--first-tokens`, edge-run alone is asked at half of the best rate, prompts of 64 tokens: how long the
first token takes (p90), against what is predicted: the pass that is under way, and that of the prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _box import READAHEAD_KB, RESULTS, ROOT, SHARED, file_at, need, program_at, run_in_box, write_results
from _http_load import Answered, ask_at
from _server_process import running
from edgebox import boxed

from edge_run.base.units import parse_size

sys.path.insert(0, str(ROOT / "tests"))

from mosquitto import free_port

TRACE = SHARED / "data" / "requests" / "azure-conv.csv"
FIRST_S, PASSES = 60.0, 2.0
NEW_TOKENS, FIRST_SHARE = 64, 0.9
TOKENS = range(300, 4000)  # words of any vocabulary
STREAMED_PEER = ("--no-repack", "--cache-ram", "0")
Request = tuple[float, list[int], int]


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=file_at)
    parser.add_argument("--peer", type=program_at, required=True, help="llama-server")
    parser.add_argument("--memory", default="2.5GiB")
    parser.add_argument("--mbps", type=int, default=500, help="0: no limit")
    parser.add_argument("--rates", type=float, nargs="+", default=[2, 4, 8], help="requests a minute")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--lengths", type=float, default=0.1, help="of those in the trace")
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--readahead-kb", type=int, default=READAHEAD_KB, help="of the drive; only mmap has it")
    parser.add_argument("--only", nargs="+", choices=("edge-run", "default", "tuned"))
    parser.add_argument("--go-on", action="store_true", help="add to the results of this day")
    parser.add_argument("--first-tokens", type=float, metavar="RATE", help="requests a minute, edge-run alone")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--cache", type=Path, help="where edge-run keeps what it measured; none: measured first")
    given = parser.parse_args()
    if given.go_on and given.first_tokens:
        parser.error("--first-tokens has results of its own, to which --go-on adds nothing")
    need(given.trace)
    with contextlib.ExitStack() as ending:
        cache = given.cache or Path(ending.enter_context(tempfile.TemporaryDirectory()))
        predicted = prediction(given, cache)
        print(predicted, flush=True)
        rows = earlier() if given.go_on else []
        if given.first_tokens:
            rows.append(first_tokens(given, cache, predicted["pass_s"]))
        else:
            for rate in given.rates:
                for name in given.only or ("edge-run", "default", "tuned"):
                    rows.append(measured(name, given, cache, rate, predicted["pass_s"]))
                    print(rows[-1], flush=True)
    told = f"{conditions(given)}\n\n{first_table(rows) if given.first_tokens else table(rows)}"
    name = "goodput-first-tokens" if given.first_tokens else "goodput"
    write_results(name, rows, f"{__doc__}\n{told}", replaces=given.go_on)


def earlier() -> list[dict[str, Any]]:
    """Return the rows that were measured on this day, if any were."""
    path = RESULTS / f"{datetime.date.today():%Y-%m-%d}-goodput.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return [
            {key: value if key == "server" else json.loads(value or "null") for key, value in row.items()}
            for row in csv.DictReader(file)
        ]


def prediction(given: argparse.Namespace, cache: Path) -> dict[str, float]:
    """Return the seconds that a pass is predicted to take for as many answers as there can be at once."""
    if not given.cache:
        words = [sys.executable, "-m", "edge_run", "probe", "--model", given.model, "-t", given.threads]
        in_box(given, [*map(str, words), "--cache-dir", str(cache)])
    program = (
        "import json, sys; from pathlib import Path; from edge_run import Model\n"
        f"with Model({str(given.model)!r}, memory={parse_size(given.memory)}, context_tokens={given.context}, "
        f"sequences={given.parallel}, threads={given.threads}, cache_folder=Path({str(cache)!r})) as model:\n"
        "    found = model.forecast() or sys.exit('this device was not measured for this model: edge-run probe')\n"
        "    print(json.dumps([found.parallel, found.parallel_tokens_per_s, found.decode_tokens_per_s]))"
    )
    done = in_box(given, [sys.executable, "-c", program])
    parallel, together, alone = json.loads(done.splitlines()[-1])
    return {"parallel": parallel, "pass_s": parallel / together if together else 1 / alone, "alone_s": 1 / alone}


def in_box(given: argparse.Namespace, words: Sequence[str]) -> str:
    """Return what a command prints that runs in the box. Ends this process where no box can be made."""
    return run_in_box(box(given, words)).stdout


def box(given: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """Return a command line that runs `words` in the box, with nothing cached."""
    limits: dict[str, Any] = {"memory": parse_size(given.memory), "disk_mbps": given.mbps or None}
    return boxed([*words], **limits, readahead_kb=given.readahead_kb, cold=given.model)


@contextlib.contextmanager
def serving(name: str, given: argparse.Namespace, cache: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Have a server run in the box for a block: its port, and what the box says of it, once the block is over."""
    port, found = free_port(), dict[str, Any]()
    usual = ["-c", given.context, "-t", given.threads, "--port", port]
    if name in ("edge-run", "packed"):
        words = [sys.executable, "-m", "edge_run", "serve", given.model, *usual, "--memory", given.memory]
        words += ["--packed", given.packed if name == "packed" else "off"]
        words += ["--parallel", given.parallel, "--cache-dir", cache, "--max-queue", 1000, "--drain", 0]
    else:
        fits = 2 * given.model.stat().st_size < parse_size(given.memory)  # also where it repacks all weights
        words = [given.peer, "-m", given.model, *usual, "--no-webui", *([] if fits else STREAMED_PEER)]
        words += [] if name == "default" else ["-np", given.parallel]
        words += ["-kvu", "-b", 128, "-ub", 128] if name == "tuned" else []
    with tempfile.TemporaryFile("w+") as log:
        try:
            with running(box(given, [*map(str, words)]), port, log):
                yield port, found
        finally:
            log.seek(0)
            *_, last = ["", *log.read().splitlines()]
            with contextlib.suppress(ValueError):  # where no box could be made; that was said
                found.update(json.loads(last))


def measured(name: str, given: argparse.Namespace, cache: Path, rate: float, pass_s: float) -> dict[str, Any]:
    """Return how one server answers at one rate."""
    requests = workload(given, rate)
    with serving(name, given, cache) as (port, found):
        answers = answered(port, requests, given)
    in_time = [is_in_time(answer, tokens, pass_s) for answer, (_, _, tokens) in zip(answers, requests, strict=True)]
    firsts = sorted(answer.first_s for answer in answers if answer.moments)
    gaps = sorted(gap for answer in answers for gap in answer.gaps_s)
    return {
        "server": name,
        "requests_per_minute": rate,
        "predicted_pass_s": pass_s,
        "requests": len(requests),
        "in_time": sum(in_time),
        "goodput_per_minute": sum(in_time) / given.minutes,
        "whole": sum(answer.is_whole for answer in answers),
        "tokens": sum(answer.tokens for answer in answers),
        "first_token_median_s": at(firsts, 0.5),
        "first_token_p90_s": at(firsts, 0.9),
        "gap_median_s": at(gaps, 0.5),
        "gap_p99_s": at(gaps, 0.99),
        "peak_bytes": found["peak_bytes"],
        "oom_kills": found["oom_kills"],
        "read_bytes": found["read_bytes"],
    }


def answered(port: int, requests: list[Request], given: argparse.Namespace) -> list[Answered]:
    """Return what came of requests. A client waits for as long as an answer in time may take, and one minute more."""
    longest_s = 60 * given.minutes + FIRST_S
    return ask_at("127.0.0.1", port, requests, longest_s, cache_prompt=False)


def workload(given: argparse.Namespace, rate: float) -> list[Request]:
    """Return the requests of so many minutes: when, which tokens, and how many are wanted."""
    with given.trace.open() as file:
        trace = [
            (
                datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(),
                int(row["ContextTokens"]),
                int(row["GeneratedTokens"]),
            )
            for row, _ in zip(csv.DictReader(file), range(max(2, math.ceil(rate * given.minutes))), strict=False)
        ]
    stretch = 60 / rate * (len(trace) - 1) / (trace[-1][0] - trace[0][0])
    chance = random.Random(1)
    most = given.context // given.parallel
    made = []
    for moment, prompt, answer in trace:
        n_answer = max(2, min(most // 2, round(given.lengths * answer)))
        n_prompt = max(4, min(most - n_answer - 1, round(given.lengths * prompt)))
        tokens = chance.choices(TOKENS, k=n_prompt)
        made.append(((moment - trace[0][0]) * stretch, tokens, n_answer))
    return made


def is_in_time(answer: Answered, tokens: int, pass_s: float) -> bool:
    """Return whether an answer came whole, began in time and went on in time."""
    if not answer.is_whole or answer.tokens < tokens:
        return False
    return answer.first_s <= FIRST_S and all(gap <= PASSES * pass_s for gap in answer.gaps_s)


def first_tokens(given: argparse.Namespace, cache: Path, pass_s: float) -> dict[str, Any]:
    """Return how long the first token takes edge-run at half load, against what is predicted."""
    requests = [
        (moment, random.Random(number).choices(TOKENS, k=NEW_TOKENS), tokens)
        for number, (moment, _, tokens) in enumerate(workload(given, given.first_tokens))
    ]
    with serving("edge-run", given, cache) as (port, _):
        answers = answered(port, requests, given)
    firsts = sorted(answer.first_s for answer in answers if answer.moments)
    predicted_s = (1 + FIRST_SHARE) * pass_s  # at p90, nine tenths of a pass are still to come
    found_s = at(firsts, FIRST_SHARE)
    return {
        "requests": len(requests),
        "requests_per_minute": given.first_tokens,
        "predicted_s": predicted_s,
        "first_token_median_s": at(firsts, 0.5),
        "first_token_p90_s": found_s,
        "ratio": found_s / predicted_s,
    }


def at(ordered: Sequence[float], share: float) -> float:
    """Return the value that so large a share does not exceed; 0 of none."""
    return round(ordered[math.ceil(share * len(ordered)) - 1], 3) if ordered else 0.0


def conditions(given: argparse.Namespace) -> str:
    """Return what all were asked under."""
    drive = f"a drive of {given.mbps} MB/s" if given.mbps else "a drive without a limit"
    return (
        f"{given.model.name} ({given.model.stat().st_size / 1e9:.2f} GB) in {given.memory}, {drive}, at most "
        f"{given.parallel} answers at once (`default`: llama-server's own number), a context of {given.context:,} "
        f"tokens, lengths {given.lengths:g} times those of the trace, {given.minutes:g} minutes."
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows for a reader, and the best of each server."""
    lines = [
        "| server | requests a minute | predicted pass | in time | goodput a minute | first token, median and p90 | "
        "gap, median and p99 | most memory | killed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['server']} | {row['requests_per_minute']:g} | "
            f"{row['predicted_pass_s']:.2f} s | {row['in_time']} of {row['requests']} | "
            f"{row['goodput_per_minute']:.2f} | {row['first_token_median_s']:.1f}, {row['first_token_p90_s']:.1f} s | "
            f"{row['gap_median_s']:.2f}, {row['gap_p99_s']:.2f} s | {(row['peak_bytes'] or 0) / 2**20:.0f} MiB | "
            f"{row['oom_kills']} |"
        )
    best = {
        name: max(row["goodput_per_minute"] for row in rows if row["server"] == name)
        for name in dict.fromkeys(row["server"] for row in rows)
    }
    for name, reach in (("default", 5.0), ("tuned", 1.5)):
        if name in best and "edge-run" in best:
            ratio = f"{best['edge-run'] / best[name]:.2f} times" if best[name] else "it has none"
            lines += ["", f"Against {name} at the best rate of each: {ratio} (reach {reach:g})."]
    return "\n".join(lines)


def first_table(rows: list[dict[str, Any]]) -> str:
    """Return the first tokens for a reader."""
    (row,) = rows
    return (
        f"{row['requests']} requests, {row['requests_per_minute']:g} a minute: p90 {row['first_token_p90_s']:.1f} s, "
        f"median {row['first_token_median_s']:.1f} s; predicted {row['predicted_s']:.1f} s: {row['ratio']:.2f} times "
        "(reach 1.2)."
    )


if __name__ == "__main__":
    main()
