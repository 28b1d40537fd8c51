"""`edge-run serve` in a process of its own, on a free port of loopback."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx

from program import Program, begin

EXACTLY = ("-c", 512, "-t", 1, "--exact", "--parallel", 1)  # so that no bit depends on what was asked before
START_S = END_S = 300.0  # a busy machine takes long; what hangs is ended by the limit of each test
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
_READY = re.compile(r"^serving .+ at (https?)://(\S+):(\d+)$", re.MULTILINE)


class Served:
    """A running server. url: its address. host, port: of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log
        found = _READY.search(wait_for(lambda: self.said if self._is_ready else "", START_S))
        assert found
        self.url = f"{found[1]}://{found[2]}:{found[3]}"
        self.host, self.port = found[2].strip("[]"), int(found[3])

    @property
    def said(self) -> str:
        """What it wrote to standard error so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.said
        return _READY.search(self.said) is not None

    def requests(self) -> tuple[int, int]:
        """Return how many requests are being answered, and how many wait."""
        found = httpx.get(f"{self.url}/edge-run/status", timeout=60).json()["requests"]
        return found["running"], found["waiting"]

    def wait_until(self, running: int, waiting: int) -> None:
        """Wait until so many requests are being answered, and so many wait."""
        wait_for(lambda: "yes" if self.requests() == (running, waiting) else "")

    def connect(self) -> socket.socket:
        """Return a connection."""
        return socket.create_connection((self.host, self.port), 30.0)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(END_S)


@contextlib.contextmanager
def served(model: Path | None, *words: object, program: Sequence[str] = ()) -> Iterator[Served]:
    """Serve a model in this block, or what the words name. program: what Python runs, where it is not `edge-run`."""
    command = ["serve", *([str(model)] if model else []), "--port", "0", *map(str, words)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ending:
        log = Path(folder, "log")
        with log.open("wb") as file:
            place = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            if program:
                process = subprocess.Popen([sys.executable, *program, *command], **place)
            else:
                process = begin(Program(command), **place)
        ending.callback(process.wait)
        ending.callback(process.kill)
        yield Served(process, log)


def wait_for(condition: Callable[[], str], within_s: float = 110.0) -> str:
    """Return what `condition` returns, once that is not empty."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
    return found
