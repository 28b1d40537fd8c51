"""Shared by the benchmarks of meshes: workers and a coordinator as processes, each in a box of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from _box import READAHEAD_KB, ROOT, run_json, skip
from edgebox import boxed

sys.path.insert(0, str(ROOT / "tests"))

RUN, READER = (ROOT / "benchmarks" / name for name in ("_mesh_run.py", "_plain_reader.py"))
TIMEOUT_S = 280


def need_mesh(*, in_networks: bool = False) -> None:
    """Skip the benchmark where there can be no mesh. in_networks: each device has a network of its own."""
    from mosquitto import PROGRAM
    from namespaces import why_not

    if PROGRAM is None:
        skip("mosquitto is not installed")
    if in_networks and (reason := why_not()):
        skip(reason)


def box(disk_mbps: float | None, model: Path) -> list[str]:
    """Return what a command is put behind to have a disk of this speed of its own; nothing where it is not limited."""
    if not disk_mbps:
        return []
    return boxed([], disk_mbps=disk_mbps, readahead_kb=READAHEAD_KB, cold=model)


def run(folder: Path, model: Path, flags: Sequence[str], disk_mbps: float | None = None) -> dict[str, Any]:
    """Run a coordinator, and return its figures."""
    command = [*box(disk_mbps, model), sys.executable, str(RUN), str(folder), str(model), *flags]
    figures, _ = run_json(command, timeout=TIMEOUT_S, env=environment())
    return figures


class Stepping:
    """A coordinator that makes as many tokens as it is asked for; others can be measured in between."""

    def __init__(self, folder: Path, model: Path, flags: Sequence[str], disk_mbps: float | None = None) -> None:
        """Start it, as `run` does; `step` waits until it is ready."""
        self._command = [*box(disk_mbps, model), sys.executable, str(RUN), str(folder), str(model), *flags]
        self._errors = folder / "errors"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [*self._command, "--tokens", "0"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(),
            )
        self.pid = self._process.pid
        self._is_ready = False

    def step(self, n_tokens: int) -> list[float]:
        """Return the seconds of each of the next `n_tokens` tokens."""
        self._is_ready = self._is_ready or self._answer() == []
        assert self._process.stdin
        self._process.stdin.write(f"{n_tokens}\n")
        self._process.stdin.flush()
        seconds: list[float] = self._answer()
        return seconds

    def finish(self) -> dict[str, Any]:
        """End it, and return its figures."""
        assert self._process.stdin
        self._process.stdin.close()
        figures: dict[str, Any] = self._answer()
        self._process.wait(TIMEOUT_S)
        return figures

    def close(self) -> None:
        """End it, if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()  # a box passes it on, and puts back what it changed
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self._command)}\n{self._errors.read_text()[-3000:]}")
        return json.loads(line)


class PlainReading:
    """Processes that read a file at a pace and do nothing else, each in a box with a disk of its own."""

    def __init__(self, model: Path, n: int, disk_mbps: float, cores: Collection[int]) -> None:
        """Start `n` of them on `cores`; they wait."""
        part = model.stat().st_size // n
        self._processes = [
            subprocess.Popen(
                [*box(disk_mbps, model), sys.executable, str(READER), str(model), str(i * part)],
                stdin=subprocess.PIPE,
                text=True,
            )
            for i in range(n)
        ]
        for process in self._processes:
            os.sched_setaffinity(process.pid, cores)

    @contextlib.contextmanager
    def at(self, bytes_per_s: float) -> Iterator[None]:
        """Have so much read by all together for a block."""
        self._tell(bytes_per_s / len(self._processes))
        try:
            yield
        finally:
            self._tell(0)

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            assert process.stdin
            process.stdin.close()
            process.wait(TIMEOUT_S)

    def _tell(self, bytes_per_s: float) -> None:
        for process in self._processes:
            assert process.stdin
            process.stdin.write(f"{bytes_per_s}\n")
            process.stdin.flush()


def cores_besides(n_computing: int) -> set[int]:
    """Return the cores of this machine that are left where so many compute; all where none would be."""
    cores = sorted(os.sched_getaffinity(0))
    return set(cores[n_computing:] or cores)


def keep_apart(processes: Iterable[psutil.Process], n_computing: int) -> None:
    """Have the threads that compute, the busiest of each process, on cores of their own, and all others elsewhere."""
    besides = cores_besides(n_computing)
    computing = set(os.sched_getaffinity(0)) - besides
    for process in processes if computing else ():
        threads = sorted(process.threads(), key=lambda thread: -thread.user_time)
        for i, thread in enumerate(threads):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, computing if i < n_computing else besides)


def environment() -> dict[str, str]:
    """Return the environment of a process whose threads leave the cores to others while they wait."""
    return {**os.environ, "OMP_WAIT_POLICY": "passive"}
