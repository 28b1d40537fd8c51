"""`edge-run plan` on a 40 GB sparse file with a vocabulary of 150,000: time and memory, of the whole command.

First with an empty cache (the file is inspected by a child process; the device's profile is known), then again, known.
Memory is the largest resident size of any one of its processes, and of all that ran at once. Python finds the modules
compiled, as after an installation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from _box import spread, write_results
from load import sparse_file


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    with sparse_file() as path, tempfile.TemporaryDirectory() as cache:
        plan(path, Path(cache), ["--no-probe"])
        plan(path, Path(cache), [])  # measures the device
        for number in range(arguments.rounds):
            for inspected in (Path(cache) / "inspected").iterdir():
                inspected.unlink()
            for state in ("new", "known"):
                rows.append({"round": number, "file": state, **plan(path, Path(cache), [])})
                print(rows[-1], flush=True)
    lines = []
    for state in ("new", "known"):
        some = [row for row in rows if row["file"] == state]
        one, together = (statistics.median(row[key] for row in some) for key in ("peak_bytes", "together_bytes"))
        seconds = spread(row["seconds"] for row in some)
        lines.append(f"* {state}: {seconds} s, {one / 1e6:.0f} MB in a process, {together / 1e6:.0f} MB together.")
    write_results("plan", rows, "\n".join([__doc__ or "", *lines]))


def plan(path: Path, cache: Path, flags: list[str]) -> dict[str, float]:
    """Run the command; return its seconds, and the most memory that one of its processes, and all together, held."""
    command = [sys.executable, "-m", "edge_run", "plan", str(path), "--memory", "4GiB", "-c", "512", "--json"]
    started = time.monotonic()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(cache / "bytecode")
    words = [*command, "--cache-dir", str(cache), *flags]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=environment)
    most = {"one": 0, "all": 0}

    def watch() -> None:
        while process.poll() is None:
            sizes = []
            try:
                parent = psutil.Process(process.pid)
                for one in (parent, *parent.children(recursive=True)):
                    sizes.append(one.memory_info().rss)
            except psutil.Error:
                pass
            most["one"], most["all"] = max([most["one"], *sizes]), max(most["all"], sum(sizes))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    seconds = time.monotonic() - started
    watcher.join()
    if code:
        raise SystemExit(f"plan failed with {code}")
    return {"seconds": seconds, "peak_bytes": most["one"], "together_bytes": most["all"]}


if __name__ == "__main__":
    main()
