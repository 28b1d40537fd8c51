"""What the doctor makes of the device: trees of procfs and sysfs, limits, and runs of the ledger."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_run.base.units import GIB, KIB, MIB
from edge_run.devices.host import checkup
from edge_run.devices.host.findings import NOTE, OK, PROBLEM
from edge_run.devices.host.ledger import Ledger, Run
from findings import state


def test_memory() -> None:
    assert state(checkup.check_memory(8 * GIB, 6 * GIB)) == OK
    assert state(checkup.check_memory(8 * GIB, 100 * MIB)) == PROBLEM


def test_limits_of_control_groups(write: Callable[..., Path]) -> None:
    root = write("proc/self/cgroup", "0::/slice/app\n")
    assert checkup.check_groups(root) == []
    write("sys/fs/cgroup/slice/app/memory.max", "max\n")
    write("sys/fs/cgroup/slice/memory.max", f"{2 * GIB}\n")
    (found,) = checkup.check_groups(root)
    assert state(found) == NOTE
    assert found.finding.startswith(f"2.00 GiB for the control group {root}/sys/fs/cgroup/slice;")


def test_runs_of_the_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    (found,) = checkup.check_runs(ledger)
    assert found.finding == "none"
    with Ledger(tmp_path, lambda promised_bytes: GIB).grant(GIB, "model.gguf", 0):
        (found,) = checkup.check_runs(ledger)
    assert state(found) == OK
    assert found.finding.startswith(f"process {os.getpid()} with model.gguf: granted 1.00 GiB, holds ")
    (found,) = checkup.check_runs(Ledger(tmp_path / "no" / "folder"))
    assert state(found) == NOTE


SWAPS = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"


def test_swap(write: Callable[..., Path], tmp_path: Path) -> None:
    assert checkup.check_swap(tmp_path) is None
    assert state(checkup.check_swap(write("proc/swaps", SWAPS))) == OK
    disk = checkup.check_swap(write("proc/swaps", SWAPS + "/swap.img  file  2097148  0  -2\n"))
    assert disk
    assert (state(disk), "2.00 GiB on /swap.img" in disk.finding) == (NOTE, True)
    zram = checkup.check_swap(write("proc/swaps", SWAPS + "/dev/zram0 partition 1048576 0 5\n" * 2))
    assert zram
    assert (state(zram), "2.00 GiB of zram" in zram.finding) == (NOTE, True)


def test_a_run_that_was_swapped_out(write: Callable[..., Path]) -> None:
    runs = [Run(pid, ("model.gguf",), GIB, GIB) for pid in (7, 8, 9)]
    write("proc/7/status", f"VmRSS:\t 9 kB\nVmSwap:\t {300 * KIB} kB\n")
    (found,) = checkup.check_swapped(runs, write("proc/8/status", "VmSwap:\t 0 kB\n"))
    assert state(found) == PROBLEM
    assert found.finding == "300 MiB of process 7 (model.gguf) is swapped out"


def test_overcommit(write: Callable[..., Path], tmp_path: Path) -> None:
    assert checkup.check_overcommit(GIB, tmp_path) is None
    assert state(checkup.check_overcommit(GIB, write("proc/sys/vm/overcommit_memory", "1\n"))) == OK
    write("proc/meminfo", f"MemTotal: 9 kB\nCommitLimit: {4 << 20} kB\nCommitted_AS: {3 << 20} kB\n")
    root = write("proc/sys/vm/overcommit_memory", "2\n")
    assert state(checkup.check_overcommit(GIB, root)) == NOTE
    assert state(checkup.check_overcommit(GIB + 1, root)) == PROBLEM


def test_mappings(write: Callable[..., Path], tmp_path: Path) -> None:
    assert checkup.check_map_count(tmp_path) is None
    root = write("proc/sys/vm/max_map_count", "65530\n")
    assert state(checkup.check_map_count(root)) == OK
    assert state(checkup.check_map_count(root, 70_000)) == NOTE
    assert state(checkup.check_map_count(write("proc/sys/vm/max_map_count", "30000\n"))) == NOTE


def test_huge_pages(write: Callable[..., Path], tmp_path: Path) -> None:
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    assert checkup.check_huge_pages(tmp_path) is None
    assert state(checkup.check_huge_pages(write(path, "always [madvise] never\n"))) == OK
    assert state(checkup.check_huge_pages(write(path, "always madvise [never]\n"))) == NOTE


def test_the_lock_limit_is_never_a_problem() -> None:
    assert state(checkup.check_lock_limit()) == OK


@pytest.mark.parametrize(
    ("driver", "governor", "wanted"),
    [
        ("acpi-cpufreq", "schedutil", OK),
        ("cpufreq-dt", "powersave", NOTE),
        ("intel_pstate", "powersave", OK),
        ("tegra194", "performance", OK),
    ],
)
def test_governor(write: Callable[..., Path], driver: str, governor: str, wanted: str) -> None:
    """Of processors that set their own speed, `powersave` is the usual governor."""
    for cpu in (0, 1):
        write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_driver", f"{driver}\n")
        root = write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor", f"{governor}\n")
    assert state(checkup.check_governor(root)) == wanted


def test_no_governor(tmp_path: Path) -> None:
    assert checkup.check_governor(tmp_path) is None
