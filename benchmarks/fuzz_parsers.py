"""Hostile input to everything of ours that reads what somebody else may have written: each reader in a process of its
own with little memory, and with an alarm.

Input is what our own writers make, then broken by chance, as bytes and as values: validly signed, compressed or
summed again around what is broken, where a reader checks that first. A reader may take an input, or refuse it in one
line by an error that is declared for it. All else is a defect: another exception, a warning, a mistake in the log, an
end of the process, 5 s for one input, more memory for one than is declared.

Memory is what Python and numpy allocated at most for one input (tracemalloc, of the last tenth of the inputs), and by
how much the resident memory of the process had grown at its peak (native libraries too), both against the declared
limit. The address space may not grow by more than that and 96 MiB. The slowest input is one of the first nine tenths.

--guided: by the coverage of our code (atheris, where it is installed), from the same seeds.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import tracemalloc
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from _box import ROOT, write_results
from _usage import forget_peak, peak_bytes, resident_bytes, status_bytes

sys.path.insert(0, str(ROOT / "tests"))

INPUTS, HANG_S, TARGET_S = 100_000, 5.0, 3600.0
TRACED_SHARE = 0.1  # of the inputs, whose allocations are counted: that takes five times as long
NOISE_BYTES, SPARE_BYTES = 24 << 20, 96 << 20  # of resident memory between inputs; of address space: stacks, arenas
MOST_SHOWN, SHOWN_BYTES = 10, 300
WARM_UP = 200  # inputs before memory is measured: imports, caches
COLUMNS = {
    "target": "target",
    "inputs": "inputs",
    "accepted": "accepted",
    "refused": "refused",
    "defects": "defects",
    "worst_ms": "slowest, ms",
    "worst_mib": "most allocated, MiB",
    "grown_mib": "process grew by, MiB",
    "declared_mib": "declared, MiB",
}


class Hang(BaseException):
    """An input took too long."""


class Mistakes(logging.Handler):
    """Notes what the library logs as a mistake of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Note one."""
        self.last = f"{record.getMessage()} {record.exc_info[1]!r}" if record.exc_info else record.getMessage()


def limit_memory(more_bytes: int) -> None:
    """Let the address space grow by so much and no further."""
    limit = status_bytes("VmSize") + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class Trial:
    """Feeds a target, and keeps the figures. box: a file with the input at hand, for the case that the process ends."""

    def __init__(self, target: Any, box: Path) -> None:
        self.target, self._box, self._mistakes = target, box, Mistakes()
        self.counts = {"accepted": 0, "refused": 0, "defect": 0}
        self.worst_s, self.worst_bytes, self.grown_bytes = 0.0, 0, 0
        self.defects: dict[str, str] = {}
        logging.getLogger().addHandler(self._mistakes)
        signal.signal(signal.SIGALRM, self._alarm)

    def _alarm(self, *_: object) -> None:
        raise Hang(f"took more than {HANG_S:.0f} s")

    def feed(self, data: bytes) -> None:
        """Try one input."""
        from parser_targets import outcome

        self._box.write_bytes(data)
        self._mistakes.last = ""
        is_traced = tracemalloc.is_tracing()
        tracemalloc.reset_peak()
        before_bytes, started_s = tracemalloc.get_traced_memory()[0], time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, HANG_S)
        try:
            what, error = outcome(self.target, data)
        except (Hang, MemoryError) as stopped:
            what, error = "defect", stopped
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        taken_bytes = tracemalloc.get_traced_memory()[1] - before_bytes
        self.worst_bytes = max(self.worst_bytes, taken_bytes)
        if not is_traced:
            self.worst_s = max(self.worst_s, time.perf_counter() - started_s)
        self.counts[what] += 1
        if what == "defect":
            self.add(_where(error), data)
        if taken_bytes > self.target.memory_bytes:
            self.add(f"took more than {self.target.memory_bytes:,} bytes", data)
        if self._mistakes.last:
            self.add(f"logged a mistake: {self._mistakes.last[:200]}", data)

    def add(self, why: str, data: bytes) -> None:
        """Note a defect, by the first input that shows it."""
        self.defects.setdefault(ascii(why), data[:SHOWN_BYTES].hex())

    def watch(self, count: int, seed: int) -> None:
        """Try `count` inputs, and see to it that the process stays small."""
        with suppress(OSError):
            forget_peak()
        before_bytes = resident_bytes()
        limit_memory(self.target.memory_bytes + SPARE_BYTES)
        for number in range(count):
            self.feed(self.target.make(random.Random(f"{seed}-{number}")))
        self.grown_bytes = peak_bytes() - before_bytes
        if self.grown_bytes > self.target.memory_bytes + NOISE_BYTES:
            self.add(f"the process grew by {self.grown_bytes:,} bytes", b"")

    def row(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "accepted": self.counts["accepted"],
            "refused": self.counts["refused"],
            "defects": self.defects,
            "worst_ms": round(1e3 * self.worst_s, 1),
            "worst_mib": round(self.worst_bytes / 2**20, 2),
            "grown_mib": round(self.grown_bytes / 2**20, 1),
            "declared_mib": self.target.memory_bytes >> 20,
        }


def _where(error: BaseException | None) -> str:
    frames = [f"{Path(one.filename).name}:{one.lineno}" for one in traceback.extract_tb(error and error.__traceback__)]
    return f"{type(error).__name__}: {str(error)[:200]} at {' '.join(frames[-3:])}"


def run_child(name: str, count: int, seed: int, is_guided: bool) -> None:
    """Try `count` inputs on a target and print the figures as JSON, the last line of standard output."""
    from parser_targets import MAKERS

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=ResourceWarning)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, ExitStack() as stack:
        target = MAKERS[name](Path(folder), stack)
        trial = Trial(target, Path(os.environ["FUZZ_BOX"]))
        target.check_seeds()
        if is_guided:
            guided(trial, count, seed)
        for number in range(WARM_UP):
            trial.feed(target.make(random.Random(f"{seed}-warm-{number}")))
        trial.counts, trial.worst_s = dict.fromkeys(trial.counts, 0), 0.0
        traced = round(count * TRACED_SHARE)
        trial.watch(count - traced, seed)
        tracemalloc.start()
        for number in range(count - traced, count):
            trial.feed(target.make(random.Random(f"{seed}-{number}")))
        tracemalloc.stop()
    print(json.dumps(trial.row()), flush=True)


def guided(trial: Trial, count: int, seed: int) -> None:
    """Try `count` inputs that coverage leads to; each that goes wrong is told at once. Ends the process."""
    import atheris  # type: ignore[import-not-found]

    target = trial.target

    def mutate(data: bytes, most_bytes: int, number: int) -> bytes:
        chance = random.Random(number)
        made = target.make(chance) if chance.random() < 0.2 else atheris.Mutate(data, most_bytes)
        return bytes(made[:most_bytes])

    def feed(data: bytes) -> None:
        known = len(trial.defects)
        trial.feed(data)
        if len(trial.defects) > known or sum(trial.counts.values()) % 5000 == 0:
            print(json.dumps(trial.row()), flush=True)

    corpus = Path(tempfile.mkdtemp())
    for number, one in enumerate([*target.seeds, *(target.make(random.Random(n)) for n in range(500))]):
        (corpus / str(number)).write_bytes(one)
    words = [f"-runs={count}", f"-seed={seed + 1}", "-max_len=100000", "-timeout=60", "-rss_limit_mb=0", str(corpus)]
    atheris.Setup([sys.argv[0], *words], feed, custom_mutator=mutate)
    atheris.Fuzz()


def try_target(name: str, count: int, seed: int, is_guided: bool) -> dict[str, Any]:
    """Run a target in a process of its own; return its row."""
    with tempfile.TemporaryDirectory() as folder:
        box = Path(folder) / "input"
        box.touch()
        environment = {**os.environ, "FUZZ_BOX": str(box), "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--child", name, "--count", str(count), "--seed", str(seed)]
        started_s = time.monotonic()
        done = subprocess.run(
            [*command, *(["--guided"] if is_guided else [])],
            capture_output=True,
            env=environment,
            cwd=ROOT,
            timeout=TARGET_S,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith(b"{")]
        row: dict[str, Any] = json.loads(lines[-1]) if lines else {"defects": {}}
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            shown = box.read_bytes()[:SHOWN_BYTES].hex()
            row["defects"][f"the process ended with {done.returncode}: {last}"] = shown
    for why, data in list(row["defects"].items())[:MOST_SHOWN]:
        print(f"  DEFECT {name}: {why}\n    input {data}", flush=True)
    row = {"target": name, "inputs": count, **row, "defects": len(row["defects"])}
    return {**row, "wall_s": round(time.monotonic() - started_s, 1)}


def told(rows: list[dict[str, Any]], seed: int) -> str:
    """Return what was found, in words and a table."""
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        cells = (row.get(name, "") for name in COLUMNS)
        lines.append("| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells) + " |")
    n_inputs, n_defects = sum(row["inputs"] for row in rows), sum(row["defects"] for row in rows)
    table = "\n".join(lines)
    return (
        f"{__doc__}\n{table}\n\n* {len(rows)} readers, {n_inputs:,} inputs, seed {seed}: {n_defects} kinds of defects."
    )


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=INPUTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="a target's name; may be given again")
    parser.add_argument("--guided", action="store_true", help="by coverage, with atheris")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--dry", action="store_true", help="write no results")
    parser.add_argument("--rows", type=Path, help="keeps rows as they come; whose row is there is not tried again")
    arguments = parser.parse_args()
    if arguments.child:
        if arguments.guided:
            import atheris

            with atheris.instrument_imports(include=["edge_run"]):
                import parser_targets  # noqa: F401
        run_child(arguments.child, arguments.count, arguments.seed, arguments.guided)
        return
    from parser_targets import MAKERS

    kept = arguments.rows
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept and kept.exists() else []
    done = {row["target"] for row in rows}
    for name in arguments.only or sorted(MAKERS):
        if name not in done:
            rows.append(try_target(name, arguments.count, arguments.seed, arguments.guided))
            print(*rows[-1].values(), sep="\t", flush=True)
            if kept:
                with kept.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    rows.sort(key=lambda row: str(row["target"]))
    finding = told(rows, arguments.seed)
    print(finding)
    if not arguments.dry:
        write_results("fuzz-parsers-guided" if arguments.guided else "fuzz-parsers", rows, finding)
    sys.exit(1 if any(row["defects"] for row in rows) else 0)


if __name__ == "__main__":
    main()
