"""Limits that fall and rise while a process runs: what it may hold then, and how often the kernel is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_run.base.units import MIB
from edge_run.devices.host import memory
from edge_run.devices.host.limit_watch import PERIOD_S, LimitWatch
from edge_run.devices.host.memory import MemoryGroup

GRANTED, OWN = 400 * MIB, 300 * MIB


class Group:
    """A control group of version 2 in files, and a clock that stands still."""

    def __init__(self, folder: Path, limit: str = "max") -> None:
        self.folder, self.now_s = folder, 100.0
        folder.mkdir(exist_ok=True)
        self.write(limit)

    def write(self, limit: str, throttle: str = "max", usage_bytes: int = OWN) -> None:
        (self.folder / "memory.max").write_text(f"{limit}\n")
        (self.folder / "memory.high").write_text(f"{throttle}\n")
        (self.folder / "memory.current").write_text(f"{usage_bytes}\n")
        (self.folder / "memory.stat").write_text("inactive_file 0\n")

    @property
    def memory_group(self) -> MemoryGroup:
        return MemoryGroup(self.folder, "memory.max", "memory.current", "memory.high")


@pytest.fixture(autouse=True)
def _a_process_that_holds_300_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    own = memory.ProcessMemory(OWN, OWN, 0, OWN)
    monkeypatch.setattr(memory, "process_memory", lambda: own)


def watching(*groups: Group) -> LimitWatch:
    return LimitWatch(GRANTED, [group.memory_group for group in groups], lambda: groups[0].now_s)


def after(group: Group, watch: LimitWatch) -> int:
    group.now_s += PERIOD_S
    return watch.lacking_bytes()


@pytest.mark.parametrize("first", ["max", str(500 * MIB), str(400 * MIB)])
def test_a_limit_that_falls_takes_away_what_it_is_below_the_grant(tmp_path: Path, first: str) -> None:
    group = Group(tmp_path, first)
    watch = watching(group)
    found = [after(group, watch)]
    for limit in (450, 390, 320, 390, 1000):
        group.write(str(limit * MIB))
        found.append(after(group, watch))
    assert found == [0, 0, 10 * MIB, 80 * MIB, 10 * MIB, 0]


def test_where_the_kernel_begins_to_slow_us_down_is_a_limit_too(tmp_path: Path) -> None:
    group = Group(tmp_path)
    watch = watching(group)
    group.write("max", throttle=str(350 * MIB))
    assert after(group, watch) == 50 * MIB


def test_what_others_hold_in_the_group_is_not_ours(tmp_path: Path) -> None:
    group = Group(tmp_path, str(600 * MIB))
    watch = watching(group)
    group.write(str(500 * MIB), usage_bytes=OWN + 150 * MIB)
    assert after(group, watch) == 50 * MIB


def test_a_limit_that_was_there_when_the_budget_was_granted_does_not_count(tmp_path: Path) -> None:
    """As one that the user knew of, or that the grant was too large for."""
    group = Group(tmp_path, str(300 * MIB))
    watch = watching(group)
    assert after(group, watch) == 0
    group.write(str(350 * MIB))
    assert after(group, watch) == 0
    group.write(str(250 * MIB))
    assert after(group, watch) == 150 * MIB


def test_the_group_that_leaves_least_counts(tmp_path: Path) -> None:
    inner, outer = Group(tmp_path / "inner"), Group(tmp_path / "outer")
    watch = watching(inner, outer)
    inner.write(str(390 * MIB))
    outer.write(str(320 * MIB))
    assert after(inner, watch) == 80 * MIB


def test_limits_are_read_once_in_a_while(tmp_path: Path) -> None:
    group = Group(tmp_path)
    watch = watching(group)
    group.write(str(320 * MIB))
    assert watch.lacking_bytes() == 0
    group.now_s += PERIOD_S / 2
    assert watch.lacking_bytes() == 0
    group.now_s += PERIOD_S / 2
    assert watch.lacking_bytes() == 80 * MIB


def test_a_group_that_is_gone_has_no_limit(tmp_path: Path) -> None:
    group = Group(tmp_path)
    watch = watching(group)
    group.write(str(320 * MIB))
    assert after(group, watch) == 80 * MIB
    (group.folder / "memory.max").unlink()
    assert after(group, watch) == 0
