"""Servers of networks that are split, as `edge-run split serve` has them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from program import Program, begin, ending, next_line


@contextlib.contextmanager
def served(folder: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a server process; yield it and its port."""
    words = ["split", "serve", str(folder / "tail.onnx"), "-t", "1", "--port", str(port)]
    with ending(begin(Program(words), stdout=subprocess.PIPE, text=True)) as process:
        line = next_line(process)
        assert line.startswith("serving 1 tail at 127.0.0.1:"), line
        yield process, int(line.rsplit(":", 1)[1])
