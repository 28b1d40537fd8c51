"""A batch of questions on a model that does not fit: its speed against one answer after the other, and kills.

    batch_questions.py MODEL [--share 0.5] [--questions 1000] [--kills 5] [--alone 30] [--rounds 1] [--fits]

`edge-run batch` answers questions of GSM8K in a budget of a share of the file, as many at once as the planner chooses.
It gets SIGKILL when 1/6, 2/6 ... of the answers are there, give or take a random number of them, and is started again
each time. In the end every question must have one answer, and no answer may have been made twice: what was written
before a kill must still be there, the same. The rate counts all tokens of answers over all the time that the batch ran,
with what the kills threw away and all openings, of which only the first is cold. `--alone` questions are answered one
after the other, half of them before the batch and half after it, so that a machine whose speed changes shows; their two
openings, which are cold, count too. With `--fits` the batch also runs, without kills, where all of the model has room:
no batch that streams computes faster than that. Reach: 8 times.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _box import GSM8K, ROOT, file_at, kill_inside, skip, spread, write_results
from batch_dask import line, made_up, n_lines, questions_of, tokens_of
from edgebox import NO_BOX, boxed

FITS = 4  # times the model: also what is beside its weights has room


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=file_at)
    parser.add_argument("--share", type=float, default=0.5, help="of the file, as budget")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--alone", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--fits", action="store_true", help="run the batch with room for all of the model, too")
    parser.add_argument("--mbps", type=int, default=0, help="of the drive; 0: no limit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--source", type=Path, default=GSM8K)
    parser.add_argument("--name", default="batch-questions")
    given = parser.parse_args()
    given.model = given.model.resolve()
    questions = questions_of(given.source, given.questions)
    chance = random.Random(given.seed)
    step = given.questions / (given.kills + 1)
    kills = [round((number + 1 + chance.uniform(-0.4, 0.4)) * step) for number in range(given.kills)]
    before, after = questions[: given.alone // 2], questions[given.alone // 2 : given.alone]
    rows: list[dict[str, Any]] = []
    for number in range(given.rounds):
        found = [
            answered(given, "alone", before, []),
            answered(given, "together", questions, kills),
            *([answered(given, "fits", questions, [])] if given.fits else []),
            answered(given, "alone", after, []),
        ]
        rows += [{"round": number, **row} for row in found]
    write_results(given.name, rows, f"{(__doc__ or '').strip()}\n\n{told(given, rows, kills)}{made_up(given.source)}")


def told(given: argparse.Namespace, rows: list[dict[str, Any]], kills: list[int]) -> str:
    """Return the rows for a reader: how fast the batch was, against one after the other and against the limit."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    rates = {way: [rate(rows, number, way) for number in range(given.rounds)] for way in ways}
    times = {way: [ours / one for ours, one in zip(rates[way], rates["alone"], strict=True)] for way in ways}
    where = f" (at {', '.join(map(str, kills))} answers)" if kills else ""
    lines = [
        f"{given.model.name}, {given.questions} questions in each of {given.rounds} rounds, all answered, each once, "
        f"after {sum(row['kills'] for row in rows)} kills{where}.\n",
        f"* {given.alone} of them, one after the other: {spread(rates['alone'])} tokens/s",
        f"* the batch: {spread(rates['together'], 1)} tokens/s, {spread(times['together'])} times",
    ]
    if "fits" in ways:
        lines.append(f"* with room for all: {spread(rates['fits'], 1)} tokens/s, {spread(times['fits'])} times")
    return "\n".join(lines)


def rate(rows: list[dict[str, Any]], number: int, way: str) -> float:
    """Return the tokens a second of one way in one round, all its runs together."""
    some = [row for row in rows if (row["round"], row["way"]) == (number, way)]
    return float(sum(row["tokens"] for row in some) / sum(row["wall_s"] for row in some))


def answered(given: argparse.Namespace, way: str, questions: list[str], kills: list[int]) -> dict[str, Any]:
    """Return how fast questions were answered; the batch is killed when so many answers are there."""
    size_bytes = given.model.stat().st_size
    budget = FITS * size_bytes if way == "fits" else round(given.share * size_bytes)
    with tempfile.TemporaryDirectory() as folder:
        source, results, kept, wall_s, n_kills = Path(folder, "in"), Path(folder, "out"), b"", 0.0, 0
        source.write_text("".join(map(line, range(len(questions)), questions)))
        words = [sys.executable, "-m", "edge_run", "batch", source, "-o", results, "-m", given.model]
        words += ["--memory", budget, "-n", given.tokens, "--temp", 0]
        words += ["--parallel", 1] if way == "alone" else []
        limits = {"memory": budget, "disk_mbps": given.mbps or None}
        for kill in [*kills, None]:
            began_s = time.monotonic()
            command = boxed([*map(str, words)], **limits, cold=None if kept else given.model, disk=given.model)
            with tempfile.TemporaryFile("w+") as said:
                process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, cwd=ROOT)
                try:
                    while process.poll() is None and not (kill and n_lines(results) >= kill):
                        time.sleep(0.05)
                finally:
                    is_killed = process.poll() is None and kill_inside(process.pid)
                code = process.wait()
                said.seek(0)
                if code == NO_BOX:
                    skip(said.read()[-1000:])
                if code and not is_killed:  # also where the kernel killed it for want of memory
                    raise SystemExit(f"batch failed:\n{said.read()[-3000:]}")
            wall_s += time.monotonic() - began_s
            n_kills += is_killed
            now = results.read_bytes()
            whole = kept[: kept.rfind(b"\n") + 1]  # a line that was being written at a kill is written again
            if not now.startswith(whole):
                raise SystemExit("an answer that was written before a kill is gone")
            kept = now
            print(way, n_lines(results), "answers after", round(wall_s), "s", flush=True)
        found = [json.loads(one) for one in kept.splitlines()]
    ids = {one["custom_id"] for one in found}
    if len(ids) != len(found) or len(found) != len(questions):
        raise SystemExit(f"{len(ids)} ids in {len(found)} answers to {len(questions)} questions")
    tokens = tokens_of(found)
    rates = {"tokens": tokens, "wall_s": wall_s, "tokens_per_s": tokens / wall_s}
    return {"way": way, "answers": len(found), "kills": n_kills, **rates}


if __name__ == "__main__":
    main()
