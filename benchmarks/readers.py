"""How to read: threads with positional direct reads against io_uring (the `liburing` package), blocks of 2 MiB into
huge pages.

Interleaved, over 1 GiB of the 4 GB model each, unthrottled. What counts is bandwidth and CPU seconds per GB.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from _box import grown_model, write_results
from _worker import BLOCK, direct_read_bandwidth

from edge_run.tiers import _libc

TOTAL = 1 << 30


def uring_bandwidth(path: Path, depth: int, total_bytes: int) -> float:
    """Return bytes per second of one thread that keeps `depth` reads in flight through io_uring."""
    import liburing as uring

    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    memory = _libc.map_anonymous((depth + 1) * BLOCK)
    first = -(-memory // BLOCK) * BLOCK
    _libc.advise_working_memory(first, depth * BLOCK)
    vectors = [uring.Iovec([_libc.view(first + i * BLOCK, BLOCK)]) for i in range(depth)]
    ring, cqe = uring.Ring(), uring.Cqe()
    uring.io_uring_queue_init(depth, ring, 0)
    started, offset, in_flight, free = time.monotonic(), 0, 0, list(range(depth))
    while offset < total_bytes or in_flight:
        while free and offset < total_bytes:
            slot = free.pop()
            entry = uring.io_uring_get_sqe(ring)
            uring.io_uring_prep_readv(entry, fd, vectors[slot], offset)
            entry.user_data = slot + 1
            offset, in_flight = offset + BLOCK, in_flight + 1
        uring.io_uring_submit(ring)
        uring.io_uring_wait_cqe(ring, cqe)
        done = cqe[0]
        result, slot = done.res, done.user_data - 1
        if result != BLOCK:
            raise OSError(-result, "io_uring read")
        free.append(slot)
        in_flight -= 1
        uring.io_uring_cq_advance(ring, 1)
    elapsed = time.monotonic() - started
    uring.io_uring_queue_exit(ring)
    os.close(fd)
    return total_bytes / elapsed


def measured(read: Callable[[], float]) -> dict[str, float]:
    """Return bandwidth and CPU seconds per GB of one run."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    bandwidth = read()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"gb_per_s": bandwidth / 1e9, "cpu_s_per_gb": cpu_s / (TOTAL / 1e9)}


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = grown_model("4G", 32)
    ways: dict[str, Callable[[], float]] = {
        f"{n} threads": lambda n=n: direct_read_bandwidth(model, n, TOTAL) for n in (1, 2, 4)
    }
    try:
        import liburing  # noqa: F401

        ways.update({f"io_uring depth {n}": lambda n=n: uring_bandwidth(model, n, TOTAL) for n in (1, 2, 4)})
    except ImportError:
        print("liburing is not installed: threads only (pip install liburing)")
    rows: list[dict[str, object]] = []
    for number in range(arguments.rounds + 1):
        for way, read in ways.items():
            figures = measured(read)
            if number:  # the first round warms up
                rows.append({"round": number, "way": way, **figures})
    lines = [
        f"* {way}: {statistics.median(float(str(r['gb_per_s'])) for r in rows if r['way'] == way):.2f} GB/s, "
        f"{statistics.median(float(str(r['cpu_s_per_gb'])) for r in rows if r['way'] == way):.3f} CPU s per GB"
        for way in ways
    ]
    print("\n".join(lines))
    write_results("readers", rows, "\n".join([__doc__ or "", *lines]))


if __name__ == "__main__":
    main()
