"""Shared by the benchmarks of meshes: workers and a coordinator as processes, each in a box of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _box import EDGEBOX, READAHEAD_KB, ROOT

sys.path.insert(0, str(ROOT / "tests"))

RUN = ROOT / "benchmarks" / "_mesh_run.py"
TIMEOUT_S = 280


def box(disk_mbps: float | None, model: Path) -> list[str]:
    """Return what a command is put behind to have a disk of this speed of its own; nothing where it is not limited."""
    if not disk_mbps:
        return []
    flags = [f"--readahead-kb={READAHEAD_KB}", f"--disk-mbps={disk_mbps}", "--cold", str(model)]
    return [sys.executable, str(EDGEBOX), *flags, "--"]


def run(folder: Path, model: Path, flags: Sequence[str], disk_mbps: float | None = None) -> dict[str, Any]:
    """Run a coordinator, and return its figures."""
    command = [*box(disk_mbps, model), sys.executable, str(RUN), str(folder), str(model), *flags]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def peak_bytes(pid: int) -> int:
    """Return the largest resident size of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
