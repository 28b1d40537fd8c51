"""Describes this machine: its processor, the cores that this process may use, and its memory."""

from __future__ import annotations

import functools
import math
import os
import platform
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from edge_run.devices.host.memory import machine_memory, memory_groups
from edge_run.devices.host.system_files import control_groups, system_text

TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # of the times in /proc/stat
_CPU_NAMES = ("model name", "Model", "Hardware", "cpu model", "uarch")  # x86, Raspberry Pi, older ARM, MIPS, RISC-V


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores that this process may use.

    logical: processors, of which a physical core may have several.
    physical: the cores that these are threads of.
    quota: how many processors' time the control groups leave it, all of `logical` without a limit.
    """

    logical: int
    physical: int
    quota: float

    @property
    def logical_at_once(self) -> int:
        """How many of `logical` can work all the time: the quota leaves no time to the others."""
        return max(1, min(self.logical, math.floor(self.quota)))

    @property
    def at_once(self) -> int:
        """How many can compute all the time: with more threads, the kernel stops all of them again and again."""
        return min(self.physical, self.logical_at_once)


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine, as far as this process may use it.

    memory_limit_bytes: of its control group, 0 for none.
    """

    cpu: str
    architecture: str
    cores: Cores
    memory_bytes: int
    memory_limit_bytes: int


def describe_machine(root: Path = Path("/")) -> Machine:
    """Return what this machine is. Reads procfs and sysfs under `root`; measures nothing."""
    limits = [group.limit_bytes for group in memory_groups(root=root)]
    return Machine(
        cpu=cpu_name(root),
        architecture=platform.machine(),
        cores=usable_cores(root),
        memory_bytes=machine_memory(root).total_bytes,
        memory_limit_bytes=min((limit for limit in limits if limit is not None), default=0),
    )


class OtherLoad:
    """How much of this process's cores others take, from the moment when this is made."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._cpus, self._root = usable_cpus(), root
        self._started_s, self._others_s = time.monotonic(), self._count_s()

    @property
    def share(self) -> float:
        """What others took of the cores so far, 0 to 1; to about a hundredth of a second."""
        elapsed_s = max(time.monotonic() - self._started_s, 1e-3)
        return min(1.0, max(0.0, (self._count_s() - self._others_s) / (elapsed_s * len(self._cpus))))

    def _count_s(self) -> float:
        """Return the seconds for which the cores worked for others since some fixed moment."""
        return _busy_s(self._cpus, self._root) - time.process_time()


def _busy_s(cpus: Collection[int], root: Path) -> float:
    """Return the seconds for which `cpus` worked since some fixed moment; all that there are, where none is named."""
    lines = (line.split() for line in system_text(root / "proc/stat").splitlines())
    ticks = {name: list(map(int, counts)) for name, *counts in lines if name.startswith("cpu")}
    named = [ticks[f"cpu{cpu}"] for cpu in cpus if f"cpu{cpu}" in ticks]  # those that are offline have no line
    if busy := named or [ticks[name] for name in ticks if name == "cpu"]:
        return sum(sum(counts[:3]) + sum(counts[5:8]) for counts in busy) / TICKS_PER_S  # not idle, iowait and guests
    import psutil  # which takes long to load

    return float(sum(seconds for name, seconds in psutil.cpu_times()._asdict().items() if name != "idle"))


def usable_cpus() -> Collection[int]:
    """Return the logical cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def usable_cores(root: Path = Path("/")) -> Cores:
    """Return the cores that this process may use. Reads procfs and sysfs under `root`."""
    cpus, folder = usable_cpus(), root / "sys/devices/system/cpu"
    siblings = {system_text(folder / f"cpu{number}/topology/thread_siblings_list") for number in cpus}
    physical = len(siblings)
    if "" in siblings:  # nobody says
        import psutil  # which takes long to load

        physical = min(len(cpus), psutil.cpu_count(logical=False) or len(cpus))
    return Cores(len(cpus), physical, min((*_quotas(root), float(len(cpus)))))


def compute_threads(wanted: int | None) -> int:
    """Return the threads to compute with: as asked, or one for each core that may compute all the time."""
    return wanted or usable_cores().at_once


def _quotas(root: Path) -> Iterator[float]:
    """Yield how many processors' time each control group of this process with a limit leaves it."""
    for folder, is_unified in control_groups("cpu", "self", root):
        names = ("cpu.max",) if is_unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(system_text(folder / name) for name in names).split()
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal():  # else `max` or -1
            yield int(words[0]) / max(1, int(words[1]))


@functools.cache
def cpu_name(root: Path = Path("/")) -> str:
    """Return the processor's name; a board's where the processor has none, as on ARM."""
    lines = [line.partition(":") for line in system_text(root / "proc/cpuinfo").splitlines()]
    fields = {key.strip(): " ".join(value.split()) for key, _, value in reversed(lines)}
    names = [fields.get(name, "") for name in _CPU_NAMES]
    names.insert(1, system_text(root / "proc/device-tree/model").strip("\0 \n"))
    return next(filter(None, names), "") or platform.processor() or platform.machine()
