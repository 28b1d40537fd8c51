"""What the machine is: procfs and sysfs as trees of files, and the machine that runs the test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from edge_run.base.units import GIB
from edge_run.devices.host import machine
from edge_run.devices.host.machine import OtherLoad, describe_machine, machine_cores

X86 = "processor\t: 0\nmodel name\t: AMD  EPYC\n\nprocessor\t: 1\nmodel name\t: AMD  EPYC\n"
RASPBERRY = "processor\t: 0\nBogoMIPS\t: 108.00\n\nHardware\t: BCM2835\nModel\t\t: Raspberry Pi 4 Model B Rev 1.4\n"
JETSON = "processor\t: 0\nBogoMIPS\t: 62.50\nCPU part\t: 0xd42\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("cpuinfo", "board", "name"),
    [
        (X86, "", "AMD EPYC"),
        (RASPBERRY, "", "Raspberry Pi 4 Model B Rev 1.4"),
        (JETSON, "NVIDIA Jetson Orin Nano Developer Kit\0", "NVIDIA Jetson Orin Nano Developer Kit"),
    ],
)
def test_name(tmp_path: Path, cpuinfo: str, board: str, name: str) -> None:
    write(tmp_path / "proc/cpuinfo", cpuinfo)
    if board:
        write(tmp_path / "proc/device-tree/model", board)
    assert describe_machine(tmp_path).cpu == name


def test_a_machine_without_procfs_has_a_name_too(tmp_path: Path) -> None:
    found = describe_machine(tmp_path)
    assert found.cpu
    assert 1 <= found.physical_cores <= found.logical_cores


def test_threads_of_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(folder / "thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    for usable, cores in (({0, 1, 4, 5}, 2), ({0, 1, 2, 3}, 4), ({7}, 1)):
        monkeypatch.setattr(machine, "usable_cpus", lambda usable=usable: usable)
        found = describe_machine(tmp_path)
        assert (found.physical_cores, found.logical_cores) == (cores, len(usable))


def test_cores_are_as_psutil_counts_them() -> None:
    assert machine_cores() == (psutil.cpu_count(logical=False) or 0)


def test_the_smallest_memory_limit_counts(tmp_path: Path) -> None:
    assert describe_machine(tmp_path).memory_limit_bytes == 0
    write(tmp_path / "proc/self/cgroup", "0::/slice/app\n")
    write(tmp_path / "sys/fs/cgroup/slice/app/memory.max", f"{4 * GIB}\n")
    write(tmp_path / "sys/fs/cgroup/slice/memory.max", f"{2 * GIB}\n")
    write(tmp_path / "sys/fs/cgroup/memory.max", "max\n")
    assert describe_machine(tmp_path).memory_limit_bytes == 2 * GIB


def test_this_machine() -> None:
    found = describe_machine()
    assert found.memory_bytes == psutil.virtual_memory().total
    assert 1 <= found.physical_cores <= found.logical_cores <= (os.cpu_count() or 1)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs cores to be pinned to")
def test_the_work_of_others_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = max(os.sched_getaffinity(0))
    monkeypatch.setattr(machine, "usable_cpus", lambda: {cpu})
    code = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nprint(1, flush=True)\nwhile True: pass"
    busy = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()
        load = OtherLoad()
        time.sleep(0.5)
        assert load.share > 0.5
    finally:
        busy.kill()
        busy.communicate()


def test_own_work_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: {0})
    now, own, user = [100.0], [5.0], [50.0]
    monkeypatch.setattr(machine.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(machine.time, "process_time", lambda: own[0])
    kind = type(psutil.cpu_times())
    times = dict.fromkeys(kind._fields, 0.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [kind(**{**times, "user": user[0], "idle": now[0]})])
    load = OtherLoad()
    now[0], own[0], user[0] = 101.0, 5.7, 50.9
    assert load.share == pytest.approx(0.2)
