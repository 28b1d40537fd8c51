"""`edge-run serve` as a service: what systemd is told, at a real socket, and the unit that the docs have."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from served import served

UNIT = Path(__file__).parents[2] / "docs/edge-run.service"
ANALYZE = shutil.which("systemd-analyze")


def test_what_the_service_manager_is_told(kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(110)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with served(kit, "-c", 128, "-t", 1) as server:
            told = manager.recv(4096).decode().split("\n")
            assert told == ["READY=1", f"STATUS=serving {kit.name} at {server.url}"]
            server.process.send_signal(signal.SIGHUP)
            assert manager.recv(4096).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
            assert manager.recv(4096).startswith(b"READY=1\n")
            assert server.end() == 0
            assert manager.recv(4096) == b"STOPPING=1"


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze")
def test_the_unit_is_right_and_leaves_little_open(tmp_path: Path) -> None:
    assert ANALYZE
    text = UNIT.read_text(encoding="utf-8")
    program = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    assert "edge-run serve " in program
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace(program, "ExecStart=/bin/true"))
    done = subprocess.run([ANALYZE, "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    limit = ["security", "--offline=true", "--threshold=20", unit]  # tenths
    assert subprocess.run([ANALYZE, *limit], capture_output=True, check=False).returncode == 0
