"""`edge-run serve` in a process of its own, on a free port of loopback."""

from __future__ import annotations

import contextlib
import functools
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from program import PRELOADED, Mother, Program, begin
from waiting import until

EXACTLY = ("-c", 512, "-t", 1, "--exact", "--parallel", 1)  # so that no bit depends on what was asked before
START_S = END_S = 100.0  # a busy machine takes long, and each test has a limit of 120 s
wait_for = functools.partial(until, limit_s=110.0)  # likewise
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
_READY = re.compile(r"^serving .+ at (https?)://(\S+):(\d+)$", re.MULTILINE)


class Served:
    """A running server. url: its address. host, port: of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log
        found = _READY.search(until(lambda: self.said if self._is_ready else "", START_S, lambda: self.said))
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

    def get(self, path: str, **how: Any) -> httpx.Response:
        """Return its answer, also where that takes long. how: as `httpx.get` takes it."""
        return httpx.get(f"{self.url}{path}", timeout=60, **how)

    def requests(self, **how: Any) -> tuple[int, int]:
        """Return how many requests are being answered, and how many wait. how: as of `get`."""
        found = self.get("/edge-run/status", **how).json()["requests"]
        return found["running"], found["waiting"]

    def aborted(self, **how: Any) -> int:
        """Return how many answers were ended before they were finished. how: as of `get`."""
        return int(self.get("/edge-run/status", **how).json()["requests"]["finished"].get("abort", 0))

    def wait_until(self, running: int, waiting: int, **how: Any) -> None:
        """Wait until so many requests are being answered, and so many wait. how: as of `get`."""
        wait_for(lambda: self.requests(**how) == (running, waiting))

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
            if program and program[0] == "-c":
                process = begin(Program(["-c", *command], source=program[1]), _mother(), **place)
            elif program:
                process = subprocess.Popen([sys.executable, *program, *command], **place)
            else:
                process = begin(Program(command), _mother(), **place)
        ending.callback(process.wait)
        ending.callback(process.kill)
        yield Served(process, log)


@functools.cache
def _mother() -> Mother:
    """Return what servers are forks of: they import half as much again as other commands."""
    return Mother.start((*PRELOADED, "edge_run.cli.commands.serve", "edge_run.runtime.server.serving"))
