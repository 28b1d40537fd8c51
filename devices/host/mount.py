"""Which file system a folder is on, and what limits reading from it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from edge_run.base.files.texts import as_text
from edge_run.devices.host.system_files import control_groups, system_text

IN_MEMORY = ("tmpfs", "ramfs")  # file systems whose files take memory
_READ_LIMITS = {"blkio.throttle.read_bps_device": " bps", "blkio.throttle.read_iops_device": " iops"}  # what they lack
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """A file system in reach of this process. Equal mounts read equally fast.

    volume: the file system's own number, which tells two drives apart that were given one name.
    limit: of reads, by the control groups, as the kernel writes it.
    """

    device: str
    file_system: str
    volume: str
    limit: str


def find_mount(path: Path, root: Path = Path("/")) -> Mount:
    """Return the file system that holds `path`, which exists. Reads procfs and sysfs under `root`. Raises OSError."""
    path = path.resolve(strict=True)
    _, number, device, file_system = max(
        (entry for entry in _mounts(root) if path == entry[0] or entry[0] in path.parents),
        key=lambda entry: len(entry[0].parts),  # of mounts over one another, the list has the last one first
        default=(path, "", "", ""),
    )
    volume = f"{os.statvfs(path).f_fsid:x}" if hasattr(os, "statvfs") else ""
    return Mount(device, file_system, volume, read_limits(_drives(number, device, root), root))


def _mounts(root: Path) -> list[tuple[Path, str, str, str]]:
    """Return (where, number, device, type) of each file system, those mounted last first."""
    try:
        content = os.fsdecode((root / "proc/self/mountinfo").read_bytes())
    except OSError:
        import psutil  # which takes long to load

        found = reversed(psutil.disk_partitions(all=True))
        return [(Path(one.mountpoint), "", as_text(one.device), one.fstype) for one in found]
    mounts = []
    for line in filter(None, reversed(content.split("\n"))):  # whoever mounts may give names with other ends of lines
        front, _, back = line.partition(" - ")
        file_system, device = back.split(" ")[:2]
        number, _, where = front.split(" ")[2:5]
        mounts.append((Path(_unescape(where)), number, as_text(_unescape(device)), file_system))
    return mounts


def _unescape(text: str) -> str:
    """Return `text` as it was before the kernel wrote spaces and the like as numbers."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def _drives(number: str, device: str, root: Path) -> Collection[str]:
    """Return the numbers of the drives that hold a file system, which limits are for; empty where nobody says.

    It may be on a part of a drive, or on a device that is made of others, as LVM's and dm-crypt's are. btrfs has a
    number that is no device's.
    """
    found, folder = set[str](), root / "sys/dev/block" / number
    left = [folder if number and folder.exists() else root / "sys/class/block" / Path(device).name]
    while left:
        folder = left.pop().resolve()
        drive = folder.parent if (folder / "partition").exists() else folder
        found.add(system_text(drive / "dev"))
        left += (drive / "slaves").glob("*")
    return found - {""}


def read_limits(drives: Collection[str] = (), root: Path = Path("/")) -> str:
    """Return what the control groups of this process limit reads to, nearest group first; empty where they do not.

    As the kernel writes it, without the groups' names: equal texts are equal limits.

    drives: the numbers of those that count, as `8:0`; all where there is none.
    """
    found: list[str] = []
    for folder, is_unified in control_groups("blkio", "self", root):
        if is_unified:
            for number, *limits in map(str.split, system_text(folder / "io.max").splitlines()):
                reads = [one for one in limits if one.startswith(("rbps=", "riops=")) and not one.endswith("=max")]
                found += [" ".join((number, *reads))] if reads else []
        else:
            for name, unit in _READ_LIMITS.items():
                found += (f"{line}{unit}" for line in system_text(folder / name).splitlines())
    return "; ".join(limit for limit in found if not drives or limit.split()[0] in drives)
