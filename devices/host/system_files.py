"""What the kernel says in files: text under procfs and sysfs, and the control groups that a process is in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def system_text(path: Path) -> str:
    """Return the text of `path` without space around it; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def control_groups(controller: str, process: int | str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the groups in which `controller` holds `process` (an id, or `self`), innermost first.

    With each comes whether it is of the one tree of all controllers (version 2). None where there are no groups.
    """
    try:
        told = os.fsdecode((root / "proc" / str(process) / "cgroup").read_bytes())
    except OSError:
        return
    for line in filter(None, told.split("\n")):  # names may have other ends of lines, and may be no text
        _, controllers, path = line.split(":", 2)
        is_unified = controllers == ""
        if is_unified or controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / ("" if is_unified else controller)
            folder = Path(os.path.normpath(base / path.lstrip("/")))  # `/../x` is outside of what we see of the tree
            while folder == base or base in folder.parents:
                yield folder, is_unified
                folder = folder.parent
