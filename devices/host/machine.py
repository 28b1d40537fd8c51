"""Describes this machine: its processor, the cores that this process may use, and its memory."""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from edge_run.devices.host.memory import machine_memory, memory_groups
from edge_run.devices.host.system_files import system_text

_CPU_NAMES = ("model name", "Model", "Hardware", "cpu model", "uarch")  # x86, Raspberry Pi, older ARM, MIPS, RISC-V


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine, as far as this process may use it.

    physical_cores, logical_cores: those that this process may use.
    memory_limit_bytes: of its control group, 0 for none.
    """

    cpu: str
    architecture: str
    physical_cores: int
    logical_cores: int
    memory_bytes: int
    memory_limit_bytes: int


def describe_machine(root: Path = Path("/")) -> Machine:
    """Return what this machine is. Reads procfs and sysfs under `root`; measures nothing."""
    usable = usable_cpus()
    limits = [group.limit_bytes for group in memory_groups(root=root)]
    return Machine(
        cpu=cpu_name(root),
        architecture=platform.machine(),
        physical_cores=_physical_cores(usable, root),
        logical_cores=len(usable),
        memory_bytes=machine_memory(root).total_bytes,
        memory_limit_bytes=min((limit for limit in limits if limit is not None), default=0),
    )


class OtherLoad:
    """How much of this process's cores others take, from the moment when this is made."""

    def __init__(self) -> None:
        self._cpus = usable_cpus()
        self._started_s, self._others_s = time.monotonic(), self._count_s()

    @property
    def share(self) -> float:
        """What others took of the cores so far, 0 to 1; to about a hundredth of a second."""
        elapsed_s = max(time.monotonic() - self._started_s, 1e-3)
        return min(1.0, max(0.0, (self._count_s() - self._others_s) / (elapsed_s * len(self._cpus))))

    def _count_s(self) -> float:
        """Return the seconds for which the cores worked for others since some fixed moment."""
        import psutil  # which takes long to load

        cores = psutil.cpu_times(percpu=True)
        idle = ("idle", "iowait", "guest", "guest_nice")  # guests are part of user and nice
        busy = (
            sum(seconds for name, seconds in cores[cpu]._asdict().items() if name not in idle)
            for cpu in self._cpus
            if cpu < len(cores)
        )
        return float(sum(busy)) - time.process_time()


def usable_cpus() -> Collection[int]:
    """Return the logical cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def machine_cores(root: Path = Path("/")) -> int:
    """Return the physical cores of the machine, also those that this process may not use; 0 where nobody says."""
    siblings = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    if found := set(map(system_text, siblings)):
        return len(found)
    import psutil  # which takes long to load

    return psutil.cpu_count(logical=False) or 0


@functools.cache
def cpu_name(root: Path = Path("/")) -> str:
    """Return the processor's name; a board's where the processor has none, as on ARM."""
    lines = [line.partition(":") for line in system_text(root / "proc/cpuinfo").splitlines()]
    fields = {key.strip(): " ".join(value.split()) for key, _, value in reversed(lines)}
    names = [fields.get(name, "") for name in _CPU_NAMES]
    names.insert(1, system_text(root / "proc/device-tree/model").strip("\0 \n"))
    return next(filter(None, names), "") or platform.processor() or platform.machine()


def _physical_cores(usable: Collection[int], root: Path) -> int:
    """Return how many cores the processors `usable` are threads of."""
    try:
        cores = {
            (root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list").read_text()
            for number in usable
        }
        return len(cores)
    except OSError:
        return max(1, min(len(usable), machine_cores(root) or len(usable)))
