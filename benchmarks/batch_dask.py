"""A batch on a Dask cluster of uneven workers, one of which is killed: its speed against that of its workers alone.

Each worker has a part of this machine's processors (`--shares`), as a control group gives it. First each answers some
questions alone, under the same quota: so many (`--alone`) that the last ones, in emptier passes, hardly count. Then all
answer all questions together; when half are answered, `--kill` names the worker that gets SIGKILL. What the cluster
could have done at most is the sum of the rates of its workers, each over the time that it lived. Rates count from the
moment at which all workers are ready to the last result, in tokens of the answers that end in that time. Needs the
`cluster` extra.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from _box import GSM8K, ROOT, file_at, kill_inside, need_box, skip, write_results
from edgebox import boxed

DASK = [sys.executable, "-m", "dask"]
READY = " answers, "  # what the command says when a worker's model is open


class Cluster:
    """A scheduler and workers, each in a box with a part of the processors."""

    def __init__(self, shares: Sequence[float], folder: Path) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        said = folder / "scheduler.json"
        scheduler = self._start(
            ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", said]
        )
        while not (said.exists() and said.read_text().rstrip().endswith("}")):
            if scheduler.poll() is not None:
                raise SystemExit(f"Dask's scheduler ended with {scheduler.returncode}")
            time.sleep(0.05)
        self.address = json.loads(said.read_text())["address"]
        n_cpus = len(os.sched_getaffinity(0))
        options = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--memory-limit", "0"]
        self.workers = [
            self._start(
                ["worker", self.address, *options, "--local-directory", folder / f"worker-{number}"], share * n_cpus
            )
            for number, share in enumerate(shares)
        ]

    def kill(self, number: int) -> None:
        """Kill a worker, in its box."""
        kill_inside(self.workers[number].pid)

    def close(self) -> None:
        """End all."""
        for process in reversed(self._started):
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            if process not in self.workers:
                process.kill()
            process.wait()

    def _start(self, words: Sequence[object], cpus: float | None = None) -> subprocess.Popen[bytes]:
        command = [*DASK, *map(str, words)]
        process = subprocess.Popen(boxed(command, cpus=cpus) if cpus else command, stderr=subprocess.DEVNULL)
        self._started.append(process)
        return process


@contextlib.contextmanager
def cluster(shares: Sequence[float]) -> Iterator[Cluster]:
    """Have a cluster for a block."""
    with tempfile.TemporaryDirectory() as folder:
        made = Cluster(shares, Path(folder))
        try:
            yield made
        finally:
            made.close()


def answer(
    shares: Sequence[float], questions: list[str], arguments: argparse.Namespace, kill: int | None = None
) -> dict[str, Any]:
    """Answer questions on a cluster of such workers; return how fast, and when a worker was killed."""
    with cluster(shares) as made, tempfile.TemporaryDirectory() as folder:
        source, results = Path(folder, "in"), Path(folder, "out")
        source.write_text("".join(map(line, range(len(questions)), questions)))
        options = ["-c", arguments.parallel * arguments.room, "-t", 1, "--parallel", arguments.parallel]
        options += ["--memory", arguments.memory, "-n", arguments.tokens, "--temp", 0]
        command = [sys.executable, "-m", "edge_run", "batch", source, "-o", results, "-m", arguments.model]
        command = [*command, "--dask", made.address, "-v", *options]
        client = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True, cwd=ROOT)
        assert client.stderr is not None
        said = ""
        while said.count(READY) < len(shares):  # all workers are awaited, so that rates are of as many as are counted
            if not (heard := client.stderr.readline()):
                raise SystemExit(f"batch failed:\n{said}")
            said += heard
        began_s, killed_s, n_before = time.monotonic(), None, n_lines(results)
        while client.poll() is None:
            if kill is not None and killed_s is None and n_lines(results) >= len(questions) // 2:
                made.kill(kill)
                killed_s = time.monotonic() - began_s
            time.sleep(0.05)
        wall_s = time.monotonic() - began_s
        if client.returncode:
            raise SystemExit(f"batch failed:\n{said}{client.stderr.read()}")
        found = [json.loads(one) for one in results.read_text().splitlines()]
    tokens = tokens_of(found[n_before:])  # the first workers answer while others are not ready
    ids = {one["custom_id"] for one in found}
    assert len(ids) == len(found) == len(questions), (len(ids), len(found), len(questions))
    return {"answers": len(found), "tokens": tokens, "wall_s": wall_s, "killed_s": killed_s}


def tokens_of(results: Sequence[dict[str, Any]]) -> int:
    """Return how many tokens answers have."""
    return sum(one["response"]["body"]["usage"]["completion_tokens"] for one in results)


def line(number: int, question: str) -> str:
    """Return a request."""
    body = {"messages": [{"role": "user", "content": question}]}
    return json.dumps({"custom_id": f"q{number}", "url": "/v1/chat/completions", "body": body}) + "\n"


def n_lines(path: Path) -> int:
    """Return how many results there are."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def questions_of(path: Path, count: int) -> list[str]:
    """Return so many questions: those of a file, or made-up ones."""
    if not path.exists():
        return [
            f"A farmer has {n} hens and buys {n % 7 + 2} more each day. How many in {n % 9 + 3} days?"
            for n in range(count)
        ]
    found = [json.loads(one) for one in path.read_text(encoding="utf-8").splitlines()]
    return [found[n % len(found)]["question"] for n in range(count)]


def made_up(path: Path) -> str:
    """Return a sentence where `questions_of` made questions up; they begin alike, which those of people do not."""
    return "" if path.exists() else f" {path} is not there: the questions were made up."


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=file_at)
    parser.add_argument("--memory", default="2GiB", help="of each worker")
    parser.add_argument("--shares", type=float, nargs="+", default=[1 / 6, 1 / 6, 2 / 6, 2 / 6])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--alone", type=int, default=600, help="requests of one worker, times its share")
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--room", type=int, default=512, help="tokens of context for each answer")
    parser.add_argument("--kill", type=int, default=2, help="the worker that is killed, counted from 0; -1 for none")
    parser.add_argument("--questions", type=Path, default=GSM8K)
    parser.add_argument("--name", default="batch-dask")
    arguments = parser.parse_args()
    if arguments.kill >= len(arguments.shares):
        parser.error(f"there is no worker {arguments.kill}")
    arguments.model = arguments.model.resolve()
    if importlib.util.find_spec("distributed") is None:
        skip("Dask is not installed: pip install -e '.[cluster]'")
    need_box(cpus=1)
    questions = questions_of(arguments.questions, arguments.requests)
    rows: list[dict[str, Any]] = []
    rates: dict[float, float] = {}
    for share in dict.fromkeys(arguments.shares):
        some = questions[: max(2 * arguments.parallel, round(arguments.alone * share))]
        found = answer([share], some, arguments)
        rates[share] = found["tokens"] / found["wall_s"]
        rows.append({"workers": f"{share:.3f}", **found, "tokens_per_s": rates[share]})
        print(rows[-1], flush=True)
    kill = arguments.kill if arguments.kill >= 0 else None
    found = answer(arguments.shares, questions, arguments, kill)
    if kill is not None and found["killed_s"] is None:
        raise SystemExit("all was answered before a worker could be killed: give it more --requests")
    lived_s = [found["killed_s"] if number == kill else found["wall_s"] for number in range(len(arguments.shares))]
    possible = sum(rates[share] * seconds for share, seconds in zip(arguments.shares, lived_s, strict=True))
    reached = found["tokens"] / possible
    rows.append({"workers": "all", **found, "tokens_per_s": found["tokens"] / found["wall_s"], "reached": reached})
    print(rows[-1], flush=True)
    text = f"{found['answers']} of {len(questions)} answers, each once; {reached:.3f} of what its workers make alone."
    text += made_up(arguments.questions)
    write_results(arguments.name, rows, f"{(__doc__ or '').strip()}\n\n{text}")


if __name__ == "__main__":
    main()
