"""How much memory this process holds, and how much it may have: procfs and cgroups on Linux, psutil elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from edge_run.base.units import MIB

MARGIN_BYTES = 256 * MIB
MARGIN_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes of this process: resident now, resident at most so far, swapped out, and private writable mappings."""

    resident_bytes: int
    peak_bytes: int
    swapped_bytes: int
    data_bytes: int


def process_memory() -> ProcessMemory:
    """Return what this process holds now."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        info = psutil.Process().memory_info()
        return ProcessMemory(info.rss, getattr(info, "peak_wset", info.rss), 0, info.vms)
    fields = dict(line.split(":", 1) for line in text.splitlines() if line.startswith("Vm"))
    resident, peak, swapped, data = (
        int(fields.get(key, "0 kB").split()[0]) * 1024 for key in ("VmRSS", "VmHWM", "VmSwap", "VmData")
    )
    return ProcessMemory(resident, peak, swapped, data)


def available_bytes(root: Path = Path("/")) -> int:
    """Return what this process may hold in all: what is available, itself included, or its cgroup's limit."""
    own = process_memory().resident_bytes
    limits = [psutil.virtual_memory().available + own]
    limits.extend(_cgroup_rooms(root, own))
    return min(limits)


def default_budget_bytes() -> int:
    """Return the budget when none is named: what is available, less a margin for everybody else."""
    available = available_bytes()
    return max(available // 2, int(available * (1 - MARGIN_SHARE)) - MARGIN_BYTES)


def _cgroup_rooms(root: Path, own_bytes: int) -> list[int]:
    """Return what each limited memory cgroup above this process leaves us, what we hold ourselves included."""
    rooms = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.lstrip("/")
        while folder == base or base in folder.parents:
            if (room := _room(folder, *names, own_bytes)) is not None:
                rooms.append(room)
            folder = folder.parent
    return rooms


def _room(folder: Path, limit_name: str, usage_name: str, own_bytes: int) -> int | None:
    try:
        limit_text = (folder / limit_name).read_text().strip()
        if limit_text == "max" or int(limit_text) >= 1 << 60:
            return None
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    others = max(0, usage - cache - own_bytes)
    return max(0, int(limit_text) - others)
