"""The store of profiles: what is kept, what is believed, what is too old, and two processes at once."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from edge_run.base.profile import DeviceProfile, DiskProfile, KernelSpeed, ReadSpeed
from edge_run.base.strict_json import decode
from edge_run.devices.host import profile as profile_module
from edge_run.devices.host.mount import Mount, find_mount
from edge_run.devices.host.profile import (
    FORMAT_VERSION,
    CostsFigure,
    DiskFigure,
    KernelFigure,
    MeasuredSetup,
    Measurements,
    PassOverheads,
    ProfileStore,
    disk_of,
)

NOW = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
DEVICE = MeasuredSetup("AMD EPYC", "x86_64", 2, 2.0, "llama-cpp-python 0.3.36")
MOUNT = Mount("/dev/vda", "ext4", "4711", "")


def at(**ago: float) -> str:
    return (NOW - timedelta(**ago)).isoformat()


def kernel(tokens: int = 1, speed: float = 1e9, date: str = at(), is_disturbed: bool = False) -> KernelFigure:
    return KernelFigure(date, is_disturbed, KernelSpeed("Q4_0", 4096, tokens, 2, False, speed))


def disk(limit: str = "", readers: int = 4, date: str = at(), speed: float = 2.5e9) -> DiskFigure:
    reads = (ReadSpeed(1 << 17, readers, 1.5e9), ReadSpeed(1 << 23, readers, speed))
    return DiskFigure(
        date, False, "4711", DiskProfile("/models", "/dev/vda", "ext4", True, limit, 2e9, (1e-11, 1e-10), reads)
    )


COSTS = CostsFigure(at(), False, PassOverheads(2, 3e-7, 2.5e-6, (5.5e9, 4.7e10)))
ALL = Measurements((kernel(1), kernel(512)), (COSTS,), (disk(),))


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    return ProfileStore(tmp_path / "cache", lambda: NOW)


def file_of(store: ProfileStore) -> Path:
    (path,) = store._folder.iterdir()
    return path


def test_what_is_saved_is_loaded(store: ProfileStore) -> None:
    assert store.load(DEVICE) == Measurements()
    assert store.save(DEVICE, ALL)
    assert store.load(DEVICE) == ALL
    assert ProfileStore(store._folder.parent, lambda: NOW).load(DEVICE) == ALL


def test_figures_are_added_and_replaced(store: ProfileStore) -> None:
    store.save(DEVICE, ALL)
    store.save(DEVICE, Measurements(kernels=(kernel(8), kernel(1, speed=7e9)), disks=(disk("8:0 rbps=5"),)))
    known = store.load(DEVICE)
    assert {figure.speed.tokens: figure.speed.bytes_per_s for figure in known.kernels} == {1: 7e9, 512: 1e9, 8: 1e9}
    assert [figure.disk.limit for figure in known.disks] == ["", "8:0 rbps=5"]
    assert known.costs == (COSTS,)


@pytest.mark.parametrize("change", [{"cpu": "Other"}, {"cores": 1}, {"library": "1.0"}, {"architecture": "arm64"}])
def test_another_device_or_library_knows_nothing(store: ProfileStore, change: dict[str, object]) -> None:
    store.save(DEVICE, ALL)
    other = dataclasses.replace(DEVICE, **change)
    assert store.load(other) == Measurements()
    store.save(other, Measurements(kernels=(kernel(3),)))
    assert store.load(DEVICE) == ALL


def test_figures_grow_old(store: ProfileStore) -> None:
    store.save(
        DEVICE,
        Measurements(
            (
                kernel(1, date=at(days=31)),
                kernel(2, date=at(days=29)),
                kernel(3, date=at(minutes=11), is_disturbed=True),
                kernel(4, date=at(minutes=9), is_disturbed=True),
                kernel(5, date=at(days=-2)),
            ),
            disks=(disk(date=at(days=31)),),
        ),
    )
    known = store.load(DEVICE)
    assert [figure.speed.tokens for figure in known.kernels] == [2, 4], "one from the future is of a wrong clock"
    assert known.disks == ()


def changed(content: dict, *keys: object, value: object) -> str:
    part = content
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    return json.dumps(content)


BROKEN = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "binary": lambda text: "\0" * 100,
    "deep": lambda text: "[" * 100_000,
    "a list": lambda text: "[]",
    "another version": lambda text: changed(json.loads(text), "format_version", value=FORMAT_VERSION + 1),
    "another device": lambda text: changed(json.loads(text), "identity", "cpu", value="Intel"),
    "unknown key": lambda text: changed(json.loads(text), "more", value=1),
    "text for a number": lambda text: changed(
        json.loads(text), "measurements", "kernels", 0, "speed", "bytes_per_s", value="1e9"
    ),
    "truth for a number": lambda text: changed(
        json.loads(text), "measurements", "kernels", 0, "speed", "tokens", value=True
    ),
    "no speed": lambda text: changed(json.loads(text), "measurements", "kernels", 0, "speed", "bytes_per_s", value=0.0),
    "infinite": lambda text: text.replace("1000000000.0", "1e999"),
    "not a number": lambda text: text.replace("1000000000.0", "NaN"),
    "no date": lambda text: changed(json.loads(text), "measurements", "kernels", 0, "measured_at", value="soon"),
    "date without zone": lambda text: changed(
        json.loads(text), "measurements", "kernels", 0, "measured_at", value="2026-11-21"
    ),
    "disk without reads": lambda text: changed(json.loads(text), "measurements", "disks", 0, "disk", "reads", value=[]),
    "three speeds of attention": lambda text: changed(
        json.loads(text), "measurements", "costs", 0, "costs", "attention_flops_per_s", value=[1.0, 2.0, 3.0]
    ),
    "huge": lambda text: text + " " * (5 << 20),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_not_ours_counts_as_none(store: ProfileStore, name: str) -> None:
    store.save(DEVICE, ALL)
    path = file_of(store)
    text = path.read_text()
    assert BROKEN[name](text) != text
    path.write_text(BROKEN[name](text))
    assert store.load(DEVICE) == Measurements()
    assert store.save(DEVICE, ALL), "and is replaced"
    assert store.load(DEVICE) == ALL


def test_a_number_may_be_written_without_a_point(store: ProfileStore) -> None:
    store.save(DEVICE, ALL)
    path = file_of(store)
    path.write_text(path.read_text().replace("1000000000.0", "1000000000"))
    assert store.load(DEVICE) == ALL


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = ProfileStore(tmp_path / "file", lambda: NOW)
    assert not store.save(DEVICE, ALL)
    assert "cannot be written (Not a directory)" in store.problem
    assert store.load(DEVICE) == Measurements()


def test_a_write_that_fails_leaves_what_was_there(store: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(DEVICE, ALL)

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        assert not store.save(DEVICE, Measurements(kernels=(kernel(8),)))
    assert "No space left" in store.problem
    assert store.load(DEVICE) == ALL
    assert file_of(store).suffix == ".json"
    assert store.save(DEVICE, ALL)
    assert store.problem == ""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_rights(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    store = ProfileStore(tmp_path / "locked" / "cache", lambda: NOW)
    assert not store.save(DEVICE, ALL)
    assert "Permission denied" in store.problem


def test_two_at_once_never_see_half_a_file(store: ProfileStore) -> None:
    """Each save is another store's, as in another process; what is read is always whole."""
    store.save(DEVICE, ALL)
    failures: list[object] = []

    def save(first: int) -> None:
        own = ProfileStore(store._folder.parent, lambda: NOW)
        for tokens in range(first, first + 40):
            if not own.save(DEVICE, Measurements(kernels=(kernel(tokens),))):
                failures.append(own.problem)
            if own.load(DEVICE).costs != (COSTS,):
                failures.append("lost")

    threads = [threading.Thread(target=save, args=(first,)) for first in (1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert file_of(store).suffix == ".json"
    assert len(store.load(DEVICE).kernels) >= 42


def test_a_disk_is_known_by_mount_limit_and_readers() -> None:
    figure = disk()
    assert figure.holds_for(MOUNT, 4)
    assert not figure.holds_for(MOUNT, 8)
    for change in ({"device": "/dev/sda"}, {"file_system": "xfs"}, {"volume": "1"}, {"limit": "8:0 rbps=1"}):
        assert not figure.holds_for(dataclasses.replace(MOUNT, **change), 4)


def test_the_disk_of_a_path(tmp_path: Path) -> None:
    mount = find_mount(tmp_path)
    here = dataclasses.replace(disk().disk, device=mount.device, file_system=mount.file_system, limit=mount.limit)
    other = dataclasses.replace(here, limit="another")
    profile = DeviceProfile(at(), "", "", 1, 1, 1, 0, 1e-6, 1e-6, (1.0, 1.0), (), (other, here), ())
    assert disk_of(profile, tmp_path) == here
    assert disk_of(dataclasses.replace(profile, disks=(other,)), tmp_path) is None
    assert disk_of(profile, tmp_path / "deleted meanwhile") is None


def test_of_two_drives_of_one_name_each_has_its_own_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As file systems in memory have, those of containers, and a drive that was put in place of another."""
    volumes = {tmp_path / name: name for name in ("a", "b", "c")}
    monkeypatch.setattr(profile_module, "find_mount", lambda path: dataclasses.replace(MOUNT, volume=volumes[path]))
    both = [dataclasses.replace(disk().disk, folder=str(tmp_path / name)) for name in ("a", "b")]
    profile = DeviceProfile(at(), "", "", 1, 1, 1, 0, 1e-6, 1e-6, (1.0, 1.0), (), tuple(both), ())
    assert [disk_of(profile, tmp_path / name) for name in ("a", "b", "c")] == [*both, both[0]]


def test_decoding_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="not a ReadSpeed"):
        decode(ReadSpeed, {"block_bytes": 1, "readers": 1})
    with pytest.raises(ValueError, match="float"):
        decode(ReadSpeed, {"block_bytes": 1, "readers": 1, "bytes_per_s": -1.0})
    assert decode(ReadSpeed, {"block_bytes": 1, "readers": 1, "bytes_per_s": 2}) == ReadSpeed(1, 1, 2.0)


def test_the_bandwidth_of_a_disk_is_that_of_large_blocks_and_under_a_limit_the_middle_one() -> None:
    reads = (ReadSpeed(1 << 17, 4, 6.2e8), ReadSpeed(1 << 20, 4, 4.9e8), ReadSpeed(8 << 20, 4, 4.8e8))
    disk = DiskProfile("/", "/dev/a", "ext4", True, "", 4e8, (1e-10, 1e-10), reads)
    assert disk.bytes_per_s == 4.8e8
    assert dataclasses.replace(disk, limit="254:0 500000000 bps").bytes_per_s == 4.9e8


def test_two_disks_side_by_side_are_as_fast_as_both_together() -> None:
    one = DiskProfile(
        "/", "/dev/a", "ext4", True, "", 4e8, (1e-10, 3e-10), (ReadSpeed(4096, 4, 1e8), ReadSpeed(8, 4, 2e8))
    )
    other = DiskProfile("/b", "/dev/b", "ext4", True, "", 1e8, (2e-10, 2e-10), (ReadSpeed(4096, 4, 7e8),))
    both = one.beside(other)
    assert both.bytes_per_s == one.bytes_per_s + other.bytes_per_s == 8e8
    assert both.first_use_bytes_per_s == 5e8
    assert both.cpu_s_per_byte == (2e-10, 3e-10)
