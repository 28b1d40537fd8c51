"""Devices as `edge-run mesh` on the command line has them: each with a home folder of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from program import Program, begin, fresh_environment, run_program

WAIT_S = 60


class Device:
    """A home folder of its own, as another device would have."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.mesh_folder = folder / ".config" / "edge-run" / "mesh"
        self.environment = fresh_environment(folder)

    def run(self, *words: str, code: int = 0, text: str | None = None) -> subprocess.CompletedProcess[str]:
        done = run_program("mesh", *words, environment=self.environment, text=text or "")
        assert done.returncode == code, done.stdout + done.stderr
        return done

    @contextlib.contextmanager
    def joined(self, *words: str, code: int = 130) -> Iterator[subprocess.Popen[str]]:
        """Take part in this block; then Ctrl-C must end it, unless it ended by itself with another `code`."""
        program = Program(["mesh", "join", *words])
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = begin(program, env=self.environment, **pipes, text=True)
        try:
            assert process.stdout is not None
            assert "joined cluster" in process.stdout.readline(), process.communicate(timeout=WAIT_S)
            yield process
            process.send_signal(signal.SIGINT)
            ended = process.wait(WAIT_S)
            if ended != code:
                raise AssertionError(f"{words}: ended with {ended}, not {code}: {process.communicate()}")
        finally:
            process.kill()
            process.communicate()
