"""How much memory there is to have: cgroups of both versions as trees of files, and this process itself."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil
import pytest

from edge_run.base.units import GIB, MIB
from edge_run.devices.host import memory
from edge_run.devices.host.memory import (
    MARGIN_BYTES,
    BesideBudgets,
    MachineMemory,
    available_bytes,
    budgeted_memory,
    charges_reserved,
    default_budget_bytes,
    machine_memory,
    process_memory,
)
from edge_run.tiers import _libc

OWN = 100 * MIB


@pytest.fixture(autouse=True)
def _a_machine_with_32_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    own = memory.ProcessMemory(OWN, OWN, 0, OWN)
    monkeypatch.setattr(memory, "process_memory", lambda: own)
    free = psutil.virtual_memory()._replace(available=32 * GIB - OWN)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)


class Tree:
    """A root folder with procfs and cgroupfs in it."""

    def __init__(self, root: Path, cgroup_lines: str) -> None:
        self.root = root
        self.write("proc/self/cgroup", cgroup_lines)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def version_2(self, path: str, limit: str, usage_bytes: int = OWN, inactive_file: int = 0) -> None:
        folder = f"sys/fs/cgroup{path}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{usage_bytes}\n")
        self.write(f"{folder}/memory.stat", f"anon 1\ninactive_file {inactive_file}\n")

    def version_1(self, path: str, limit: str, usage_bytes: int = OWN, inactive_file: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory{path}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{usage_bytes}\n")
        self.write(f"{folder}/memory.stat", f"inactive_file 7\ntotal_inactive_file {inactive_file}\n")


def test_without_cgroups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 32 * GIB


def test_version_2_limit(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/app\n")
    tree.version_2("/app", str(2 * GIB))
    assert available_bytes(tmp_path) == 2 * GIB


def test_version_1_limit_beside_other_controllers(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "9:name=systemd:/app\n5:cpu,cpuacct:/app\n4:memory:/app\n0::/\n")
    tree.version_1("/app", str(2 * GIB))
    assert available_bytes(tmp_path) == 2 * GIB


def test_the_limit_of_a_group_further_up_counts_too(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/slice/app\n")
    tree.version_2("/slice/app", "max")
    tree.version_2("/slice", str(3 * GIB))
    assert available_bytes(tmp_path) == 3 * GIB


def test_what_others_in_the_group_hold_is_not_ours(tmp_path: Path) -> None:
    """Their page cache is: the kernel gives it back first."""
    tree = Tree(tmp_path, "0::/app\n")
    tree.version_2("/app", str(4 * GIB), usage_bytes=GIB + OWN + 512 * MIB, inactive_file=512 * MIB)
    assert available_bytes(tmp_path) == 3 * GIB


def test_version_1_counts_the_cache_of_the_whole_subtree(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "4:memory:/app\n")
    tree.version_1("/app", str(4 * GIB), usage_bytes=OWN + GIB, inactive_file=GIB)
    assert available_bytes(tmp_path) == 4 * GIB


@pytest.mark.parametrize(
    "kept",
    [{"kernel": 7 * MIB, "slab": MIB}, {"kernel_stack": MIB, "pagetables": 2 * MIB, "slab": 4 * MIB}],
    ids=["now", "before Linux 5.18"],
)
def test_a_budget_of_a_whole_group_is_there_though_files_were_read_and_the_kernel_keeps_tables(
    kept: dict[str, int], tmp_path: Path
) -> None:
    """Libraries that were read twice are "active" pages of the group, and those that are mapped are resident here."""
    own = memory.ProcessMemory(OWN, OWN, 0, OWN, file_bytes=30 * MIB)
    cache, kernel = {"inactive_file": 5 * MIB, "active_file": 40 * MIB}, 7 * MIB
    usage_bytes = OWN - own.file_bytes + sum(cache.values()) + kernel
    tree = Tree(tmp_path, "0::/app\n")
    tree.version_2("/app", str(GIB), usage_bytes)
    tree.write("sys/fs/cgroup/app/memory.stat", "".join(f"{k} {v}\n" for k, v in {**cache, **kept}.items()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "process_memory", lambda: own)
        assert available_bytes(tmp_path) == GIB
        tree = Tree(tmp_path, "4:memory:/app\n")
        tree.version_1("/app", str(GIB), usage_bytes + MIB // 4)  # its counters lag
        folder = "sys/fs/cgroup/memory/app"
        tree.write(f"{folder}/memory.stat", "".join(f"total_{k} {v}\n" for k, v in cache.items()))
        assert available_bytes(tmp_path) == GIB - kernel - MIB // 4
        tree.write(f"{folder}/memory.kmem.usage_in_bytes", f"{kernel}\n")
        assert available_bytes(tmp_path) == GIB


@pytest.mark.parametrize("unlimited", ["max", str(2**63 - 4096)])
def test_no_limit_is_no_limit(tmp_path: Path, unlimited: str) -> None:
    tree = Tree(tmp_path, "0::/app\n4:memory:/app\n")
    tree.version_2("/app", unlimited)
    tree.version_1("/app", unlimited)
    assert available_bytes(tmp_path) == 32 * GIB


def test_in_a_container_the_group_lies_at_the_root_of_what_is_mounted(tmp_path: Path) -> None:
    """/proc names the path as the host sees it; only the root of the tree is there."""
    tree = Tree(tmp_path, "4:memory:/docker/0123abcd\n")
    tree.version_1("", str(GIB))
    assert available_bytes(tmp_path) == GIB


def test_a_full_group_leaves_nothing_and_never_less(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/app\n")
    tree.version_2("/app", str(GIB), usage_bytes=3 * GIB)
    assert available_bytes(tmp_path) == 0


def test_a_group_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/app\n")
    tree.write("sys/fs/cgroup/app/memory.max", "a word that a later kernel invents\n")
    assert available_bytes(tmp_path) == 32 * GIB


def test_promises_count_in_the_group_they_were_given_in(tmp_path: Path) -> None:
    """A run outside of our group takes of the machine's memory, and nothing of what the group has."""
    tree = Tree(tmp_path, "0::/app\n")
    tree.version_2("/app", str(4 * GIB))
    promised = {None: 20 * GIB, tmp_path / "sys/fs/cgroup/app": GIB}
    assert available_bytes(tmp_path, lambda group: promised[group]) == 3 * GIB
    promised[None] = 30 * GIB
    assert available_bytes(tmp_path, lambda group: promised[group]) == 2 * GIB
    promised[None] = 40 * GIB
    assert available_bytes(tmp_path, lambda group: promised[group]) == -8 * GIB


def test_the_default_budget_is_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda **_: -GIB)
    assert default_budget_bytes() == 0


def test_the_groups_of_a_process_outside_of_what_we_see(tmp_path: Path) -> None:
    """In a container the kernel writes their paths relative to our root."""
    tree = Tree(tmp_path, "0::/app\n")
    tree.write("proc/7/cgroup", "0::/../other/app\n")
    tree.write("proc/8/cgroup", "0::/app/part\n")
    base = tmp_path / "sys/fs/cgroup"
    assert list(memory.memory_groups(7, tmp_path)) == []
    assert [group.folder for group in memory.memory_groups(8, tmp_path)] == [base / "app/part", base / "app", base]
    assert list(memory.memory_groups(9, tmp_path)) == []


@pytest.mark.parametrize("available", [32 * GIB, GIB, 300 * MIB])
def test_the_default_budget_leaves_a_margin_but_at_least_half(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda **_: available)
    budget = default_budget_bytes()
    assert available // 2 <= budget < available
    assert budget == available // 2 or budget <= available - MARGIN_BYTES


def test_a_process_sees_its_own_memory_grow() -> None:
    """Against the kernel itself: resident when touched, data when mapped, the peak kept after it is gone."""
    size = 64 * MIB
    before = process_memory()
    address = _libc.map_anonymous(size)
    _libc.view(address, size)[:: _libc.PAGE] = bytes(size // _libc.PAGE)
    held = process_memory()
    _libc.unmap(address, size)
    after = process_memory()
    assert held.resident_bytes - before.resident_bytes >= size * 0.95
    assert held.data_bytes - before.data_bytes >= size
    assert after.resident_bytes <= held.resident_bytes - size * 0.95
    assert after.peak_bytes >= held.resident_bytes - MIB


def test_a_process_of_any_name_says_what_it_holds() -> None:
    """The kernel cuts a name to 15 bytes, be that within a letter."""
    place = Path("/proc/self/comm")
    if not place.exists():
        pytest.skip("there is no procfs")
    before = place.read_bytes().rstrip(b"\n")
    place.write_bytes(("\u0430" * 12).encode())
    try:
        assert b"\xd0\n" in Path("/proc/self/status").read_bytes()
        assert min(process_memory().resident_bytes, process_memory(os.getpid()).resident_bytes) > 0
    finally:
        place.write_bytes(before)


def test_the_kernel_says_what_the_machine_has(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "")
    tree.write("proc/meminfo", "MemTotal:  4096 kB\nMemFree:   1 kB\nMemAvailable: 1024 kB\nHugePages_Total:   0\n")
    assert machine_memory(tmp_path) == MachineMemory(4 * MIB, MIB)
    assert available_bytes(tmp_path) == MIB + OWN


@pytest.mark.parametrize("said", ["", "MemTotal: 4096 kB\n", "MemTotal: 4096 kB\nMemAvailable: 8192 kB\n"])
def test_psutil_knows_where_the_kernel_does_not_say(tmp_path: Path, said: str) -> None:
    Tree(tmp_path, "").write("proc/meminfo", said)
    assert machine_memory(tmp_path) == MachineMemory(psutil.virtual_memory().total, 32 * GIB - OWN)


@pytest.mark.parametrize(("said", "is_charged"), [("0\n", False), ("1\n", False), ("2\n", True), ("", False)])
def test_the_kernel_says_whether_it_charges_what_is_reserved(tmp_path: Path, said: str, is_charged: bool) -> None:
    if said:
        Tree(tmp_path, "").write("proc/sys/vm/overcommit_memory", said)
    assert charges_reserved(tmp_path) is is_charged


def test_what_is_beside_budgets_is_not_measured_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "BESIDE_BUDGETS", beside := BesideBudgets())
    beside.add(30 * MIB)
    found = budgeted_memory()
    assert (found.resident_bytes, found.data_bytes) == (OWN - 30 * MIB, OWN - 30 * MIB)
    beside.add(-30 * MIB)
    assert budgeted_memory() == memory.process_memory()


def test_memory_is_measured_once_it_is_known_what_a_change_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "BESIDE_BUDGETS", beside := BesideBudgets())
    found = list[int]()
    measuring = threading.Thread(target=lambda: found.append(budgeted_memory().resident_bytes))
    with beside.changing:
        measuring.start()
        measuring.join(0.05)
        assert not found
        beside.add(MIB)
    measuring.join(30)
    assert found == [OWN - MIB]
