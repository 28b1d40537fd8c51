"""Which file system a folder is on, and what limits reads: procfs and cgroupfs as trees of files."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from edge_run.devices.host.mount import find_mount, read_limits


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine whose disks are mounted under `tmp_path/disk`, one with a space in its name."""
    (tmp_path / "disk/with space/models").mkdir(parents=True)
    (tmp_path / "disk2").mkdir()
    mounts = [
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw",
        f"30 22 8:1 / {tmp_path}/disk rw - btrfs /dev/sda1 rw,subvol=/x",
        f"31 30 0:50 / {tmp_path}/disk/with\\040space rw master:1 propagate_from:2 - nfs4 server:/a\\040b rw",
    ]
    write(tmp_path / "proc/self/mountinfo", "\n".join(mounts) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "device", "file_system"),
    [
        ("disk", "/dev/sda1", "btrfs"),
        ("disk/with space/models", "server:/a b", "nfs4"),
        ("disk2", "/dev/vda1", "ext4"),
    ],
)
def test_the_longest_mount_point_wins(root: Path, folder: str, device: str, file_system: str) -> None:
    mount = find_mount(root / folder, root)
    assert (mount.device, mount.file_system, mount.limit) == (device, file_system, "")


def test_of_two_at_one_place_the_later_counts(root: Path) -> None:
    info = root / "proc/self/mountinfo"
    write(info, info.read_text() + f"40 22 0:60 / {root}/disk rw - tmpfs tmpfs rw\n")
    assert find_mount(root / "disk", root).file_system == "tmpfs"


def test_who_mounts_may_give_any_names(root: Path) -> None:
    """The kernel writes out spaces, tabs, line feeds and backslashes; other ends of lines stay as they are."""
    info, folder = root / "proc/self/mountinfo", root / "disk/a\x0cb\u2028c"
    folder.mkdir()
    info.write_bytes(info.read_bytes() + f"41 30 0:61 / {folder} rw - fuse.x ".encode() + b"caf\xe9 rw\n")
    mount = find_mount(folder, root)
    assert (mount.device, mount.file_system) == ("caf\ufffd", "fuse.x")
    assert find_mount(root / "disk", root).device == "/dev/sda1"


def test_a_link_is_followed(root: Path) -> None:
    (root / "link").symlink_to(root / "disk")
    assert find_mount(root / "link", root).device == "/dev/sda1"


def test_without_procfs_psutil_knows(tmp_path: Path) -> None:
    mount = find_mount(tmp_path, tmp_path)
    assert any((mount.device, mount.file_system) == (p.device, p.fstype) for p in psutil.disk_partitions(all=True))


def test_this_machine(tmp_path: Path) -> None:
    mount = find_mount(tmp_path)
    assert mount == find_mount(tmp_path.parent)
    assert mount.file_system


def test_version_2_limits_of_all_groups_above(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/slice/a\x0c\r\u2028pp\n")
    write(tmp_path / "sys/fs/cgroup/slice/a\x0c\r\u2028pp/io.max", "8:0 rbps=500000000 wbps=max riops=max wiops=max\n")
    write(tmp_path / "sys/fs/cgroup/slice/io.max", "8:0 rbps=max wbps=max riops=120 wiops=max\n")
    assert read_limits(root=tmp_path) == "8:0 rbps=500000000; 8:0 riops=120"


def test_a_limit_of_writes_is_none_of_reads(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/app\n")
    write(tmp_path / "sys/fs/cgroup/app/io.max", "8:0 rbps=max wbps=5000 riops=max wiops=7\n")
    assert read_limits(root=tmp_path) == ""


@pytest.mark.parametrize(
    ("folder", "wanted"),
    [
        ("disk", "8:0 rbps=5"),  # btrfs, by its device's name
        ("disk2", "254:0 rbps=7"),
        ("disk3", "8:0 rbps=5; 8:16 rbps=6"),  # of two drives
        ("disk/with space", "8:0 rbps=5; 8:16 rbps=6; 254:0 rbps=7"),  # over a network: nobody knows
    ],
)
def test_a_limit_of_another_drive_is_none_of_this_one(root: Path, folder: str, wanted: str) -> None:
    (root / "disk3").mkdir()
    info = root / "proc/self/mountinfo"
    write(
        info, info.read_text().replace(" 8:1 ", " 0:40 ") + f"41 22 253:0 / {root}/disk3 rw - ext4 /dev/mapper/a rw\n"
    )
    for number, place in {"254:0": "vda", "8:0": "sda", "8:1": "sda/sda1", "8:16": "sdb", "253:0": "dm-0"}.items():
        write(root / f"sys/devices/{place}/dev", f"{number}\n")
        for link in (root / f"sys/dev/block/{number}", root / f"sys/class/block/{Path(place).name}"):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(root / f"sys/devices/{place}")
    write(root / "sys/devices/sda/sda1/partition", "1\n")
    (root / "sys/devices/dm-0/slaves").mkdir()
    for name, place in {"sda1": "sda/sda1", "sdb": "sdb"}.items():
        (root / f"sys/devices/dm-0/slaves/{name}").symlink_to(root / f"sys/devices/{place}")
    write(root / "proc/self/cgroup", "0::/app\n")
    write(root / "sys/fs/cgroup/app/io.max", "8:0 rbps=5\n8:16 rbps=6\n254:0 rbps=7\n")
    assert find_mount(root / folder, root).limit == wanted


def test_version_1_limits(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "7:blkio:/box-17\n4:memory:/other\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/blkio/box-17"
    write(folder / "blkio.throttle.read_bps_device", "254:0 500000000\n")
    write(folder / "blkio.throttle.read_iops_device", "254:0 90\n")
    assert read_limits(root=tmp_path) == "254:0 500000000 bps; 254:0 90 iops"
    assert read_limits(["8:0"], tmp_path) == ""
    write(tmp_path / "proc/self/cgroup", "7:blkio:/\n0::/\n")
    assert read_limits(root=tmp_path) == ""
    write(tmp_path / "proc/self/cgroup", "7:blkio:/../box-17\n0::/\n")
    assert read_limits(root=tmp_path) == "", "outside of what this namespace shows"
