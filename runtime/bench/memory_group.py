"""A memory group (cgroup) of our own, for a process that is to have no more memory than it says, page cache included.

One can be made by root, and by a user in a session whose groups were given to them. A group that would take a process
out of other limits (of its disk, its cores) is not made: what is measured in it would not be comparable.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from edge_run.base.errors import reason_of
from edge_run.devices.host.memory import MemoryGroup, memory_groups
from edge_run.devices.host.system_files import system_text

PREFIX = "edge-run-bench-"
NEWER_LIMIT = "memory.max"  # of version 2
_REMOVAL_TRIES, _REMOVAL_WAIT_S = 50, 0.05
_JOIN = 'echo $$ > "$0/cgroup.procs"'


class OwnMemoryGroup:
    """A group of `limit_bytes` without swap, made anew for each process that runs in it. Closing is idempotent.

    reason: why none can be made, empty where it can.
    """

    def __init__(self, limit_bytes: int, root: Path = Path("/")) -> None:
        self.limit_bytes, self.reason = limit_bytes, ""
        self._folder: Path | None = None
        self._limit_name = ""
        problems = []
        for place in _places(root):
            _remove_left_over(place.folder)
            self._limit_name = place.limit_name
            try:
                self._make(place.folder / f"{PREFIX}{os.getpid()}")
                subprocess.run(["/bin/sh", "-c", _JOIN, str(self._folder)], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                problems.append(_why(error))
                self.close()
                self._folder = None
            else:
                return
        self.reason = f"no memory group can be made here ({problems[0] if problems else 'none was given to this user'})"

    def renew(self) -> Path | None:
        """Return the folder of a group that is empty and was charged nothing yet, None where none can be made."""
        if self._folder is not None:
            self.close()
            self._make(self._folder)
        return self._folder

    @property
    def kills(self) -> int:
        """How many processes the kernel ended in it for want of memory."""
        if self._folder is None:
            return 0
        for name in ("memory.events", "memory.oom_control"):
            if text := system_text(self._folder / name):
                return int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))
        return 0

    def close(self) -> None:
        """Remove the group; whoever was in it must have ended."""
        if self._folder is not None:
            _remove(self._folder)

    def _make(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        (folder / self._limit_name).write_text(str(self.limit_bytes))
        is_newer = self._limit_name == NEWER_LIMIT
        swap = folder / ("memory.swap.max" if is_newer else "memory.memsw.limit_in_bytes")
        if swap.exists():  # else the kernel does not count swap
            swap.write_text(str(0 if is_newer else self.limit_bytes))


def _places(root: Path) -> Iterator[MemoryGroup]:
    """Yield groups in which one of our own could be made without leaving a limit that this process has."""
    for group in memory_groups(root=root):
        if not group.folder.is_dir():
            continue
        if group.limit_name != NEWER_LIMIT:
            yield group
            return
        if "memory" in system_text(group.folder / "cgroup.subtree_control").split():
            yield group
        if any(_limits(group.folder)):
            return


def _limits(folder: Path) -> Iterator[bool]:
    yield system_text(folder / "io.max") != ""
    for name in ("cpu.max", "memory.max", "memory.high"):
        yield not system_text(folder / name).startswith("max") and (folder / name).exists()
    yield system_text(folder / "cpuset.cpus") != ""


def _remove_left_over(place: Path) -> None:
    """Remove the groups of processes that were killed."""
    for folder in place.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX)
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _remove(folder: Path) -> None:
    """Remove a group; it stays busy for a moment after its last process has ended."""
    for _ in range(_REMOVAL_TRIES):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(_REMOVAL_WAIT_S)
        else:
            return


def _why(error: OSError | subprocess.CalledProcessError) -> str:
    if isinstance(error, OSError):
        return reason_of(error)
    return "a process may not be moved into it"
