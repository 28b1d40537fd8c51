"""`edge-run batch --dask`: a scheduler and workers that are processes, of which one is killed, and so is the client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kit_models import KIT
from program import ending, run_program
from waiting import until

pytest.importorskip("starlette")
pytestmark = [
    pytest.mark.timeout(400),  # six processes start, one after the other
    # It is not imported here: it has other errors pickled in a way that those of ours cannot be.
    pytest.mark.skipif(not find_spec("distributed"), reason="needs distributed: pip install 'edge-run[cluster]'"),
]
WAIT_S = 120.0
N_REQUESTS, N_TOKENS = 64, 32  # so many that they are not over before one is killed
DASK = [sys.executable, "-m", "dask"]
WORKER = [*DASK, "worker", "--no-nanny", "--no-dashboard", "--nthreads", "1", "--memory-limit", "0"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The address of a scheduler, and two workers."""
    said = tmp_path / "scheduler.json"
    place: dict[str, Any] = {"stderr": subprocess.DEVNULL, "cwd": tmp_path}
    listening = ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
    scheduler = subprocess.Popen([*DASK, *listening, "--scheduler-file", said], **place)
    found = ["--scheduler-file", said, "--local-directory"]
    workers = [subprocess.Popen([*WORKER, *found, tmp_path / f"w{number}"], **place) for number in range(2)]
    try:
        until(lambda: said.exists() and said.read_text().rstrip().endswith("}"), WAIT_S)
        yield json.loads(said.read_text())["address"], workers
    finally:
        for process in (*workers, scheduler):
            process.kill()
            process.wait()


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    """Wait for something that is so before `process` ends."""
    until(lambda: is_so() or process.poll() is not None, WAIT_S)
    assert is_so()


def test_nothing_is_lost_or_done_twice(tmp_path: Path, cluster: tuple[str, list[subprocess.Popen[bytes]]]) -> None:
    address, workers = cluster
    source, results = tmp_path / "in", tmp_path / "out"
    body = {"max_tokens": N_TOKENS, "ignore_eos": True}
    requests = [
        {"custom_id": f"n{i}", "url": "/v1/completions", "body": {**body, "prompt": f"Number {i}"}}
        for i in range(N_REQUESTS)
    ]
    source.write_text("\n".join([*map(json.dumps, requests), "no JSON"]) + "\n")
    words = ["batch", source, "-o", results, "--dask", address, "-c", "1024", "-t", "1", "--parallel", "2"]
    command = [sys.executable, "-m", "edge_run", *map(str, words), "-m", str(KIT)]

    def n_lines() -> int:
        return results.read_bytes().count(b"\n") if results.exists() else 0

    with ending(subprocess.Popen(command, stderr=subprocess.PIPE)) as killed:
        wait_until(lambda: n_lines() >= 4, killed)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
    n_before = n_lines()
    assert n_before < N_REQUESTS

    with ending(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as client:
        wait_until(lambda: n_lines() > n_before, client)
        os.kill(workers[0].pid, signal.SIGKILL)
        said = client.communicate(timeout=WAIT_S)[1]
    assert client.returncode == 0, said
    assert f"{N_REQUESTS + 1 - n_before} requests answered, {n_before} were there" in said
    assert "is gone" in said
    found = {one["custom_id"]: one["response"] for one in map(json.loads, results.read_text().splitlines())}
    assert n_lines() == len(found) == N_REQUESTS + 1
    assert found.pop(None)["status_code"] == 400
    assert {one["body"]["usage"]["completion_tokens"] for one in found.values()} == {N_TOKENS}


def test_a_scheduler_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("")
    done = run_program("batch", tmp_path / "in", "-o", tmp_path / "out", "-m", KIT, "--dask", "carrier://pigeon")
    assert done.returncode == 10
    assert len(done.stderr.splitlines()) == 1
    assert "dask carrier://pigeon: no scheduler answers" in done.stderr
