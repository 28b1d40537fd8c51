"""What goes to standard output and to standard error, where the two are not one terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import sys
import termios
from pathlib import Path

import pytest

from edge_run.cli.shared.terminal import Terminal
from program import fresh_environment, run_program
from routes import write_trace


def test_progress_fits_the_terminal_of_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 40, 0, 0))
    with open(master, "rb", buffering=0) as shown, open(slave, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        Terminal().show("x" * 100)
        assert shown.read(200) == b"x" * 39


def test_json_of_a_file_whose_name_is_no_text(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / os.fsdecode(b"caf\xe9.csv"))
    done = run_program("replay", trace, "--json", environment=fresh_environment(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "caf" in json.loads(done.stdout)["trace"]
