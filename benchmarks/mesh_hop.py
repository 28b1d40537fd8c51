"""What a hop over the data link adds: a token's activation, 16 KiB (4,096 float32), between two processes, and back.

Two processes over loopback, encrypted (CURVE), through the whole of the link: header, queue, thread. Half of a round
trip is a hop. Rows: alone; a prompt's activations (2 MiB); with every core kept busy by other processes (nice 5). Then
how soon the other side's death and freezing are known.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from _box import write_results

from edge_run.base.errors import DeviceLost
from edge_run.devices.link.connection import Peer
from edge_run.devices.link.data_link import DataLink

BUSY = "import os\nos.nice(5)\nwhile True: pass"


def echo(key: str, place: str) -> None:
    """Be the other side: print who we are, then send back what comes."""
    link = DataLink()
    link.set_peers({"bench": Peer("bench", "1", key, (place,))})
    print(link.key, f"tcp://127.0.0.1:{link.port}", flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    while True:
        message = link.receive(timeout_s=1)
        if message is not None:
            link.send(message.node, message.header, message.parts, timeout_s=5)


def partner(link: DataLink) -> subprocess.Popen[str]:
    place = f"tcp://127.0.0.1:{link.port}"
    process = subprocess.Popen(
        [sys.executable, __file__, "--echo", link.key, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    key, other = process.stdout.readline().split()
    link.set_peers({"other": Peer("other", str(process.pid), key, (other,))})
    return process


def hops(link: DataLink, size: int, count: int) -> dict[str, Any]:
    """Send an activation there and back, again and again, and return what half of that takes."""
    activation, times = memoryview(os.urandom(size)), []
    for number in range(count + 50):
        started = time.perf_counter()
        link.send("other", {"epoch": 1, "token": number}, [activation], timeout_s=5)
        message = link.receive(timeout_s=5)
        assert message is not None
        assert message.parts[0].nbytes == size
        if number >= 50:
            times.append((time.perf_counter() - started) / 2)
    cuts = statistics.quantiles(times, n=100)
    return {"bytes": size, "hops": count, "p50_ms": cuts[49] * 1e3, "p90_ms": cuts[89] * 1e3, "p99_ms": cuts[98] * 1e3}


def loss(how: signal.Signals) -> float:
    """Return after how many seconds of a conversation's end the link says so."""
    link = DataLink()
    process = partner(link)
    try:
        hops(link, 1 << 14, 50)
        started = time.perf_counter()
        process.send_signal(how)
        while True:
            try:
                link.receive(timeout_s=10)
            except DeviceLost:
                return time.perf_counter() - started
    finally:
        process.kill()
        process.communicate()
        link.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--echo", nargs=2)
    parser.add_argument("--hops", type=int, default=5000)
    given = parser.parse_args()
    if given.echo:
        echo(*given.echo)
    link = DataLink()
    process = partner(link)
    rows: list[dict[str, Any]] = []
    try:
        rows.append({"case": "alone"} | hops(link, 1 << 14, given.hops))
        rows.append({"case": "a prompt's activations"} | hops(link, 2 << 20, given.hops // 20))
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
        try:
            time.sleep(0.5)
            rows.append({"case": "all cores busy"} | hops(link, 1 << 14, given.hops))
        finally:
            for one in busy:
                one.kill()
                one.wait()
    finally:
        process.kill()
        process.communicate()
        link.close()
    lines = ["| case | bytes | hops | p50, ms | p90, ms | p99, ms |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r['case']} | {r['bytes']:,} | {r['hops']:,} | {r['p50_ms']:.3f} | {r['p90_ms']:.3f} | {r['p99_ms']:.3f} |"
        for r in rows
    ]
    lines += ["", "| the other side | tries | known after, s (median) | at most |", "|---|---|---|---|"]
    for name, how in (("killed (SIGKILL)", signal.SIGKILL), ("frozen (SIGSTOP)", signal.SIGSTOP)):
        times = [loss(how) for _ in range(10)]
        rows.append({"case": name, "hops": len(times), "median_s": statistics.median(times), "most_s": max(times)})
        lines.append(f"| {name} | {len(times)} | {statistics.median(times):.3f} | {max(times):.3f} |")
    print("\n".join(lines))
    write_results("mesh-hop", rows, "\n".join([__doc__ or "", *lines]))


if __name__ == "__main__":
    main()
