"""Ids of processes: where one stands for one process, and whether that still runs."""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path

_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def pid_namespace() -> int:
    """Return within what a process id of ours stands for one process; in another container it is another's."""
    try:
        return _NAMESPACE.stat().st_ino
    except OSError:
        return 0


def process_scope() -> str:
    """Return eight letters for where a process id of ours stands for one process: here, until the machine restarts.

    On another machine they are others, though the number of the first namespace is the same on all.
    """
    boot = b""
    with contextlib.suppress(OSError), open(_BOOT, "rb") as file:
        boot = file.read(64)
    return f"{zlib.crc32(boot + str(pid_namespace()).encode()):08x}"


def is_running(process: int) -> bool:
    """Return whether a process with this id is there, whoever's it is."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's
    return True
