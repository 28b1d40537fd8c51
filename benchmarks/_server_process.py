"""A server, edge-run's or llama-server, as a process that takes requests."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import IO

import httpx
from _box import ROOT

START_S = 900.0


@contextlib.contextmanager
def running(command: Sequence[object], port: int, log: IO[str]) -> Iterator[None]:
    """Have a server run for a block, which begins when it takes requests at `port`.

    log: gets what it writes to standard error. Ends this process where the server does not start.
    """
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=log, cwd=ROOT)
    try:
        _wait_for(port, process, log)
        yield
    finally:
        process.terminate()  # a box passes it on, and puts back what it changed
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: IO[str]) -> None:
    ends_s = time.monotonic() + START_S
    while time.monotonic() < ends_s:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=30).status_code == 200:
                return
        if process.poll() is not None:
            log.seek(0)
            raise SystemExit(f"a server did not start:\n{log.read()[-3000:]}")
        time.sleep(0.5)
    raise SystemExit("a server did not start in time")
