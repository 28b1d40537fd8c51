"""Servers of networks that are split, as `edge-run split serve` has them."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal

from edge_run.runtime.split.server import SplitServer, Tail
from program import Program, begin, ending, next_line


@contextlib.contextmanager
def served(folder: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a server process; yield it and its port."""
    words = ["split", "serve", str(folder / "tail.onnx"), "-t", "1", "--port", str(port)]
    with ending(begin(Program(words), stdout=subprocess.PIPE, text=True)) as process:
        line = next_line(process)
        assert line.startswith("serving 1 tail at 127.0.0.1:"), line
        yield process, int(line.rsplit(":", 1)[1])


class SlowServer:
    """A server in this process, each of whose frames takes `takes_s`, and what it computed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.takes_s, self.computed, self.answer = 0.0, 0, [np.zeros((1, 4), np.float32)]
        self.at_work = threading.Event()
        monkeypatch.setattr(Tail, "answer", lambda *_: self._answer())
        self._server = SplitServer([folder / "tail.onnx"], threads=1)

    def _answer(self) -> list[Any]:
        self.computed += 1
        self.at_work.set()
        time.sleep(self.takes_s)
        return self.answer

    @contextlib.contextmanager
    def running(self) -> Iterator[int]:
        """Serve in this block; yield the port."""

        async def serve(*, task_status: TaskStatus[int]) -> None:
            await self._server.serve("127.0.0.1", 0, task_status.started)

        with start_blocking_portal() as portal:
            future, port = portal.start_task(serve)
            try:
                yield port
            finally:
                future.cancel()
