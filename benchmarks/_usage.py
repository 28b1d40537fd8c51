"""What a process has used so far, as Linux says: the processor, the drives, and memory.

Workers of peers use it too, in environments of their own: it imports nothing but Python's own.
"""

from __future__ import annotations

import os
from pathlib import Path

SELF = "self"


def used_s() -> float:
    """Return the processor's seconds of this process so far."""
    times = os.times()
    return times.user + times.system


def read_bytes() -> int:
    """Return what this process has read from storage so far, page faults included."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["read_bytes"])


def resident_bytes(process: int | str = SELF) -> int:
    """Return what a process holds now; 0 of one that has ended."""
    return status_bytes("VmRSS", process)


def peak_bytes(process: int | str = SELF) -> int:
    """Return the most that a process has held so far, or since `forget_peak`; 0 of one that has ended."""
    return status_bytes("VmHWM", process)


def forget_peak(process: int | str = SELF) -> None:
    """Have the peak of a process begin anew with what it holds now. Raises OSError where the system refuses."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def status_bytes(name: str, process: int | str = SELF) -> int:
    """Return the figure of that name in the status of a process; 0 of one that has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
