"""What the machine is: procfs and sysfs as trees of files, and the machine that runs the test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edge_run.base.units import GIB
from edge_run.devices.host import machine
from edge_run.devices.host.checkup import check_host, check_quota
from edge_run.devices.host.machine import Cores, OtherLoad, compute_threads, describe_machine, usable_cores
from waiting import until

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
    assert 1 <= found.cores.physical <= found.cores.logical


def test_threads_of_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(folder / "thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    for usable, cores in (({0, 1, 4, 5}, 2), ({0, 1, 2, 3}, 4), ({7}, 1)):
        monkeypatch.setattr(machine, "usable_cpus", lambda usable=usable: usable)
        found = usable_cores(tmp_path)
        assert found == describe_machine(tmp_path).cores == Cores(len(usable), cores, len(usable))
        assert found.at_once == cores, "two threads of a core take turns"
        assert found.logical_at_once == len(usable)


@pytest.mark.parametrize(
    ("files", "quota", "at_once"),
    [
        ({"cpu.max": "50000 100000"}, 0.5, 1),
        ({"cpu.max": "350000 100000"}, 3.5, 3),
        ({"cpu.max": "max 100000"}, 4.0, 4),
        ({"cpu.max": "900000 100000"}, 4.0, 4),
        ({"cpu.max": "max 100000", "../cpu.max": "200000 100000"}, 2.0, 2),
        ({"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "50000"}, 3.0, 3),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 4.0, 4),
        ({}, 4.0, 4),
    ],
)
def test_a_quota_of_processor_time(
    files: dict[str, str], quota: float, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cpus", lambda: range(4))
    for cpu in range(4):
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu}\n")
    is_version_1 = "cpu.cfs_quota_us" in files
    write(tmp_path / "proc/self/cgroup", "3:cpu,cpuacct:/slice/app\n" if is_version_1 else "0::/slice/app\n")
    for name, text in files.items():
        folder = "sys/fs/cgroup" + "/cpu" * is_version_1
        write(tmp_path / folder / ("slice" if name.startswith("..") else "slice/app") / Path(name).name, f"{text}\n")
    found = usable_cores(tmp_path)
    assert (found.quota, found.at_once, found.logical_at_once) == (quota, at_once, at_once)
    note = check_quota(tmp_path)
    assert (note is not None) == (quota < 4)
    assert note is None or note.finding.startswith(f"control groups leave the time of {quota:g} of 4 processors: ")


@pytest.mark.parametrize(
    ("times", "state", "percent"),
    [
        ("100 0 100 9000 0 0 0 0 0 0", None, ""),  # a real machine
        ("100 0 100 9000", None, ""),  # an old kernel
        ("900 20 50 9000 70 5 5 20 0 0", "ok", "2.0 %"),
        ("500 100 100 9000 70 50 50 200 0 0", "note", "20.0 %"),
    ],
)
def test_time_that_a_host_takes(times: str, state: str | None, percent: str, tmp_path: Path) -> None:
    assert check_host(tmp_path) is None
    write(tmp_path / "proc/stat", f"cpu  {times}\ncpu0 {times}\nintr 5 0\n")
    found = check_host(tmp_path)
    assert (found and found.state) == state
    assert found is None or f" {percent} of the processor time" in found.finding
    assert found is None or bool(found.advice) == (state == "note")


def test_cores_are_as_psutil_counts_them() -> None:
    assert usable_cores().physical <= (psutil.cpu_count(logical=False) or 0)


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
    assert 1 <= found.cores.at_once <= found.cores.physical <= found.cores.logical <= (os.cpu_count() or 1)


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
        until(lambda: load.share > 0.5)
    finally:
        busy.kill()
        busy.communicate()


@pytest.mark.parametrize(
    ("usable", "share"), [({0}, 0.2), ({3}, 0.0), ({4}, 0.3), ({5}, 0.0), ({0, 4, 9}, 0.4), ({7}, 1.0)], ids=str
)
def test_own_work_does_not_count(
    usable: set[int], share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what other processors do. Those that are offline have no line, so that a number is no place in the list."""
    monkeypatch.setattr(machine, "usable_cpus", lambda: usable)
    now, own = [100.0], [5.0]
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: now[0], process_time=lambda: own[0]))

    def say(**user: int) -> None:
        lines = {"cpu": 10_000 + sum(user.values()), "cpu0": 5000, "cpu3": 5000, "cpu4": 5000, "cpu5": 5000}
        text = (f"{cpu} {ticks + user.get(cpu, 0)} 7 7 {now[0]:.0f} 9 0 0 0 3 0\n" for cpu, ticks in lines.items())
        write(tmp_path / "proc/stat", "".join(text) + "intr 5 0\nctxt 9\n")

    say()
    load = OtherLoad(tmp_path)
    now[0], own[0] = 101.0, 5.7
    say(cpu0=90, cpu4=100)
    assert load.share == pytest.approx(share)


@pytest.mark.parametrize(
    ("wanted", "cores", "found"),
    [
        (None, Cores(8, 4, 8.0), 4),
        (None, Cores(8, 4, 0.5), 1),
        (None, Cores(8, 4, 2.5), 2),
        (7, Cores(8, 4, 0.5), 7),
    ],
)
def test_threads(wanted: int | None, cores: Cores, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    assert compute_threads(wanted) == found
