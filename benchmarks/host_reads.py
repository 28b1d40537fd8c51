"""Why a virtual machine's host takes CPU time while we read: for the reads, or because CPUs fall idle between them?

    host_reads.py FILE [--seconds 6] [--rounds 5]

Readers go round the first 256 MiB of FILE past the page cache, blocks of 2 MiB into huge pages, as the product reads,
and in turn nothing is read: on CPUs that fall idle, on CPUs that a loop of the lowest class (SCHED_IDLE) keeps awake,
and beside a loop of usual priority on each CPU. What counts is the steal time of /proc/stat, in which a CPU that had
work waited for the host, beside the readers' own CPU time and how far the loops count. On real hardware there is none.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
from _box import spread, write_results
from _worker import direct_read_bandwidth

CPUS = ("idle", "awake", "busy")
READERS = (1, 2, 4)
STEP_BYTES = 256 << 20
LOOP = 100_000
AWAKE = """import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while True:
    pass
"""


@contextmanager
def kept_awake() -> Iterator[None]:
    """Keep each CPU from falling idle, by a loop of the lowest class, which gives way to everything."""
    loops = [
        subprocess.Popen([sys.executable, "-c", AWAKE, str(cpu)], stdin=subprocess.DEVNULL)
        for cpu in os.sched_getaffinity(0)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def counted(seconds: float, counts: multiprocessing.Queue[float]) -> None:
    """Count for `seconds`; put how many millions a second."""
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for _ in range(LOOP):
            count += 1
    counts.put(count / seconds / 1e6)


def measured(path: Path, n_readers: int, cpus: str, seconds: float) -> dict[str, object]:
    """Return what one stretch of `seconds` read, and took."""
    counts: multiprocessing.Queue[float] = multiprocessing.Queue()
    n_loops = (os.cpu_count() or 1) if cpus == "busy" else 0
    loops = [multiprocessing.Process(target=counted, args=(seconds, counts)) for _ in range(n_loops)]
    before, own = psutil.cpu_times(), resource.getrusage(resource.RUSAGE_SELF)
    started, read_bytes = time.monotonic(), 0
    for loop in loops:
        loop.start()
    while n_readers and time.monotonic() - started < seconds:
        direct_read_bandwidth(path, n_readers, min(STEP_BYTES, path.stat().st_size))
        read_bytes += min(STEP_BYTES, path.stat().st_size)
    time.sleep(max(0.0, started + seconds - time.monotonic()))
    rates = [counts.get() for _ in loops]
    for loop in loops:
        loop.join()
    elapsed, after, spent = time.monotonic() - started, psutil.cpu_times(), resource.getrusage(resource.RUSAGE_SELF)
    return {
        "readers": n_readers,
        "cpus": cpus,
        "mb_per_s": round(read_bytes / elapsed / 1e6, 1),
        "steal_s": round(after.steal - before.steal, 2),
        "own_cpu_s": round(spent.ru_utime + spent.ru_stime - own.ru_utime - own.ru_stime, 2),
        "gb": round(read_bytes / 1e9, 3),
        "seconds": round(elapsed, 2),
        "loops_m_per_s": round(sum(rates), 2),
    }


def finding(rows: list[dict[str, object]]) -> str:
    """Return the table of medians and spreads."""
    lines = [
        "| CPUs | readers | MB/s | steal, CPU s a second | readers' own CPU s per GB | loops, millions a second |",
        "|---|---|---|---|---|---|",
    ]
    for cpus in CPUS:
        for n_readers in (0, *READERS):
            those = [
                {key: float(str(value)) for key, value in row.items() if key != "cpus"}
                for row in rows
                if row["cpus"] == cpus and row["readers"] == n_readers
            ]
            own = spread([row["own_cpu_s"] / row["gb"] for row in those], 3) if n_readers else ""
            counted_loops = spread([row["loops_m_per_s"] for row in those], 1) if cpus == "busy" else ""
            lines.append(
                f"| {cpus} | {n_readers} | {spread([row['mb_per_s'] for row in those], 0)} | "
                f"{spread([row['steal_s'] / row['seconds'] for row in those], 2)} | {own} | {counted_loops} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="host-reads")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for number in range(1, arguments.rounds + 1):
        for cpus in CPUS:
            for n_readers in (0, *READERS):
                with kept_awake() if cpus == "awake" else nullcontext():
                    rows.append({"round": number, **measured(arguments.file, n_readers, cpus, arguments.seconds)})
                print(rows[-1], flush=True)
    text = finding(rows)
    print(text)
    write_results(arguments.name, rows, f"{__doc__}\n{text}")


if __name__ == "__main__":
    main()
