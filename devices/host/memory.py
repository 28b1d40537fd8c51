"""How much memory this process holds and may hold: from procfs and cgroups on Linux, from psutil elsewhere."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edge_run.base.units import MIB
from edge_run.devices.host.system_files import control_groups, system_text

MARGIN_BYTES = 256 * MIB
MARGIN_SHARE = 0.05
LAG_BYTES_PER_CORE = MIB // 2  # each core keeps back 64 pages of what a group uses, and as many of what its cache has
_KERNEL_PARTS = ("kernel_stack", "pagetables", "percpu", "vmalloc", "slab")

Promised = Callable[[Path | None], int]


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes of a process: resident now, resident at most so far, swapped out, and private writable mappings.

    file_bytes: the part of what is resident that is of files, which the kernel counts as page cache.
    """

    resident_bytes: int
    peak_bytes: int
    swapped_bytes: int
    data_bytes: int
    file_bytes: int = 0

    @property
    def taken_bytes(self) -> int:
        """What is resident, or was swapped out: that comes back when it is used, whatever was planned meanwhile."""
        return self.resident_bytes + self.swapped_bytes

    @property
    def held_bytes(self) -> int:
        """What is resident and nobody else could have: the kernel takes the page cache back when it needs memory."""
        return self.resident_bytes - self.file_bytes


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A memory cgroup: its folder, and its files' names in this version of cgroups.

    throttle_name: of the limit beyond which the kernel slows its processes down; empty where there is none.
    """

    folder: Path
    limit_name: str
    usage_name: str
    throttle_name: str = ""

    @property
    def limit_bytes(self) -> int | None:
        """The lower of its limits; None where it has none, or cannot be read."""
        names = (self.limit_name, self.throttle_name) if self.throttle_name else (self.limit_name,)
        return min((limit for name in names if (limit := self._limit(name)) is not None), default=None)

    def _limit(self, name: str) -> int | None:
        try:
            text = (self.folder / name).read_text().strip()
            return None if text == "max" or int(text) >= 1 << 60 else int(text)
        except (OSError, ValueError):
            return None


def _nothing(group: Path | None) -> int:
    return 0


class _Peak:
    """What this process held at most before the kernel was told to count anew."""

    earlier_bytes = 0


def count_peak_anew(earlier_bytes: int) -> None:
    """Have the peak counted from now on: the kernel counted a page as often as it was mapped.

    earlier_bytes: what the peak was before that; `process_memory` goes on telling it. Linux only, nothing elsewhere.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        _Peak.earlier_bytes = max(_Peak.earlier_bytes, earlier_bytes)


def process_memory(process: int | None = None) -> ProcessMemory:
    """Return what a process (an id; None for this one) holds now. Raises psutil.Error for another that is gone."""
    try:
        # A process may have any name, which the kernel cuts to 15 bytes, be that within a letter.
        text = Path(f"/proc/{process or 'self'}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        import psutil

        info = psutil.Process(process).memory_info()
        return ProcessMemory(info.rss, getattr(info, "peak_wset", info.rss), 0, info.vms)
    fields = dict(line.split(":", 1) for line in text.splitlines() if line.startswith(("Vm", "Rss")))
    resident, peak, swapped, data, files = (
        int(fields.get(key, "0 kB").split()[0]) * 1024 for key in ("VmRSS", "VmHWM", "VmSwap", "VmData", "RssFile")
    )
    earlier_peak = 0 if process else _Peak.earlier_bytes
    return ProcessMemory(resident, max(peak, earlier_peak), swapped, data, files)


class BesideBudgets:
    """What this process holds for a while that is in no budget, such as what a server was asked. Thread-safe.

    changing: is held by who takes memory of which it is not known yet how much it will be, until that is added.
    """

    def __init__(self) -> None:
        self._lock, self.changing = threading.Lock(), threading.Lock()
        self.n_bytes = 0

    def add(self, n_bytes: int) -> None:
        """Note that so many bytes are held from now on; less than 0: that they are given back."""
        with self._lock:
            self.n_bytes += n_bytes


BESIDE_BUDGETS = BesideBudgets()


def budgeted_memory() -> ProcessMemory:
    """Return what this process holds now, less what is beside budgets: of that no plan is made."""
    with BESIDE_BUDGETS.changing:
        found, beside_bytes = process_memory(), BESIDE_BUDGETS.n_bytes
    resident_bytes, data_bytes = found.resident_bytes - beside_bytes, found.data_bytes - beside_bytes
    return replace(found, resident_bytes=max(0, resident_bytes), data_bytes=max(0, data_bytes))


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """The memory of the whole machine, and what of it is available without swapping, in bytes."""

    total_bytes: int
    available_bytes: int


def machine_memory(root: Path = Path("/")) -> MachineMemory:
    """Return what memory this machine has. Reads procfs under `root`; asks psutil where that does not say."""
    lines = (line.split() for line in system_text(root / "proc/meminfo").splitlines())
    counts = {words[0]: int(words[1]) << 10 for words in lines if words[-1] == "kB"}
    total, available = counts.get("MemTotal:", 0), counts.get("MemAvailable:", 0)
    if 0 < available <= total:
        return MachineMemory(total, available)
    import psutil  # which takes long to load

    found = psutil.virtual_memory()
    return MachineMemory(found.total, found.available)


def available_bytes(root: Path = Path("/"), promised_bytes: Promised = _nothing) -> int:
    """Return what this process may hold in all: what is available, itself included, or its cgroup's limit.

    promised_bytes: what is spoken for already, of the machine's memory (for None) or of that of a cgroup (for its
    folder); the result may then be negative.
    """
    own = process_memory()
    rooms: list[tuple[Path | None, int]] = [(None, machine_memory(root).available_bytes + own.held_bytes)]
    for group in memory_groups("self", root):
        if (room := room_bytes(group, own)) is not None:
            rooms.append((group.folder, room))
    return min(room - promised_bytes(folder) for folder, room in rooms)


def default_budget_bytes(promised_bytes: Promised = _nothing) -> int:
    """Return the budget when none is named: what is available, less what is promised, less a margin for the others."""
    available = max(0, available_bytes(promised_bytes=promised_bytes))
    return max(available // 2, int(available * (1 - MARGIN_SHARE)) - MARGIN_BYTES)


def charges_reserved(root: Path = Path("/")) -> bool:
    """Return whether the kernel charges a program for memory that it has only reserved (vm.overcommit_memory is 2)."""
    return system_text(root / "proc/sys/vm/overcommit_memory").strip() == "2"


def memory_groups(process: int | str = "self", root: Path = Path("/")) -> Iterator[MemoryGroup]:
    """Yield the memory cgroups that `process` (an id) is in, innermost first; none where there are no cgroups."""
    for folder, is_unified in control_groups("memory", process, root):
        if is_unified:
            yield MemoryGroup(folder, "memory.max", "memory.current", "memory.high")
        else:
            yield MemoryGroup(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")


def room_bytes(group: MemoryGroup, own: ProcessMemory | None = None) -> int | None:
    """Return what a cgroup leaves us, what we hold ourselves included; None where it has no limit.

    Its page cache is no one's: the kernel gives it back first, as it does of the whole machine. Nor is what the kernel
    itself keeps, of which most is for our pages.
    """
    limit, own = group.limit_bytes, own or process_memory()
    if limit is None:
        return None
    try:
        usage = int((group.folder / group.usage_name).read_text())
        stat = dict(line.split() for line in (group.folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    cache = sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in ("inactive_file", "active_file"))
    others = max(0, usage - cache - _kernel_bytes(group, stat) - own.held_bytes)
    return max(0, limit - (others if others > LAG_BYTES_PER_CORE * (os.cpu_count() or 1) else 0))


def _kernel_bytes(group: MemoryGroup, stat: dict[str, str]) -> int:
    """Return what the kernel itself keeps in a group: its sum, or, before Linux 5.18, the parts that there are."""
    try:
        names = [name for name in (["kernel"] if "kernel" in stat else _KERNEL_PARTS) if name in stat]
        if names:
            return sum(int(stat[name]) for name in names)
        return int((group.folder / "memory.kmem.usage_in_bytes").read_text())  # version 1
    except (OSError, ValueError):
        return 0
