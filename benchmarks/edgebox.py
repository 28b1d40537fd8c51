"""Runs a command as if on a small device: little memory, a slow disk, few cores, and nothing cached.

    edgebox.py [--memory 2G] [--disk-mbps 500] [--readahead-kb 128] [--cores 0,1] [--cpus 0.5] [--cold FILE ...]
        [--disk FILE] -- COMMAND [ARG ...]

`--memory`, `--disk-mbps` and `--cpus` limit a control group (version 1 or 2) of its own, which has no swap. The page
cache counts as memory there, and a page is charged to the group that read it first: one that another process has read
would cost nothing. `--cold` therefore drops what the kernel has cached before the command starts, so that all the
command needs is read, and charged to it. FILE says which disk is meant, and several FILEs mean several disks, each with
these limits; `--disk FILE` names one and drops nothing; without either it is the disk of the working folder. Read-ahead
is a setting of the disk, not of a group: boxes that run at once share it, and the last one puts it back. Where this
program is killed, so is the command.

The last line on standard error is JSON, the `Figures`. The exit status is the command's own (128 + N after signal N),
or 125 with a line that says why no box can be made: that takes root, and control groups that root may write to.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from edge_run.base.errors import EdgeRunError
from edge_run.base.units import parse_size

NO_BOX = 125
GROUPS = Path("/sys/fs/cgroup")
PREFIX = "edgebox-"
CPU_PERIOD_US = (
    10_000  # in each of which a group may compute for its share: short, so that it is slow, and not only rare
)
REMOVAL_TRIES, REMOVAL_WAIT_S = 100, 0.05
PR_SET_PDEATHSIG = 1  # of prctl: the signal that a process gets when the one that started it ends


class NoBox(EdgeRunError):
    """No box can be made here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a box allows: memory, reads from each disk (`devices` are their `major:minor`), processors.

    None does not limit.
    """

    memory_bytes: int | None = None
    read_bytes_per_s: int | None = None
    devices: tuple[str, ...] = ()
    cpus: float | None = None


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a command took. peak_bytes: page cache included; None where the kernel does not tell (before Linux 5.19).

    limit_hits: how often memory was at the limit and something had to give way. read_bytes: from all disks, the
    program's own files included.
    """

    wall_s: float
    exit: int
    limit_bytes: int | None
    peak_bytes: int | None
    oom_kills: int
    limit_hits: int | None
    read_bytes: int


class GroupsV1:
    """One group under the memory controller and one under the block devices', inside those of this process."""

    def __init__(self, name: str) -> None:
        places = dict(_own_places())
        if not {"memory", "blkio"} <= places.keys():
            raise NoBox("control groups of version 1 without the controllers memory and blkio")
        self.memory = GROUPS / "memory" / places["memory"] / name
        self.disk = GROUPS / "blkio" / places["blkio"] / name
        self.cpu = GROUPS / "cpu" / places["cpu"] / name if "cpu" in places else None
        self.folders = tuple(folder for folder in (self.memory, self.disk, self.cpu) if folder)

    def limit(self, limits: Limits) -> None:
        """Set `limits`, where the groups are there."""
        if limits.memory_bytes:
            _write(self.memory / "memory.limit_in_bytes", limits.memory_bytes)
            if (both := self.memory / "memory.memsw.limit_in_bytes").exists():  # a kernel without swap has none
                _write(both, limits.memory_bytes)
        # 0 is no limit; a kernel that was never asked for one counts no bytes of the disk
        for device in limits.devices:
            _write(self.disk / "blkio.throttle.read_bps_device", f"{device} {limits.read_bytes_per_s or 0}")
        if limits.cpus:
            if self.cpu is None:
                raise NoBox("control groups of version 1 without the controller cpu")
            _write(self.cpu / "cpu.cfs_period_us", CPU_PERIOD_US)
            _write(self.cpu / "cpu.cfs_quota_us", int(limits.cpus * CPU_PERIOD_US))

    def figures(self) -> dict[str, int | None]:
        """Return the groups' part of `Figures`."""
        reads = re.findall(r"^[\d:]+ Read (\d+)$", _text(self.disk / "blkio.throttle.io_service_bytes"), re.MULTILINE)
        return {
            "peak_bytes": _number(self.memory / "memory.max_usage_in_bytes"),
            "oom_kills": _pairs(self.memory / "memory.oom_control").get("oom_kill", 0),
            "limit_hits": max(_number(self.memory / f"memory.{kind}failcnt") or 0 for kind in ("", "memsw.")),
            "read_bytes": sum(map(int, reads)),
        }


class GroupsV2:
    """One group at the root of what this process sees of the tree: groups further in may not be divided."""

    def __init__(self, name: str) -> None:
        self.group = GROUPS / name
        self.folders = (self.group,)
        with contextlib.suppress(OSError):  # where it cannot be switched on and is not, limits fail below
            _write(GROUPS / "cgroup.subtree_control", "+memory +io")

    def limit(self, limits: Limits) -> None:
        """Set `limits`, where the group is there."""
        if limits.memory_bytes:
            _write(self.group / "memory.max", limits.memory_bytes)
            if (swap := self.group / "memory.swap.max").exists():
                _write(swap, 0)
        for device in limits.devices if limits.read_bytes_per_s else ():
            _write(self.group / "io.max", f"{device} rbps={limits.read_bytes_per_s}")
        if limits.cpus:
            with contextlib.suppress(OSError):
                _write(GROUPS / "cgroup.subtree_control", "+cpu")
            _write(self.group / "cpu.max", f"{int(limits.cpus * CPU_PERIOD_US)} {CPU_PERIOD_US}")

    def figures(self) -> dict[str, int | None]:
        """Return the group's part of `Figures`."""
        return {
            "peak_bytes": _number(self.group / "memory.peak"),
            "oom_kills": _pairs(self.group / "memory.events").get("oom_kill", 0),
            "limit_hits": _pairs(self.group / "memory.events").get("max", 0),
            "read_bytes": sum(map(int, re.findall(r"rbytes=(\d+)", _text(self.group / "io.stat")))),
        }


@contextlib.contextmanager
def groups(limits: Limits) -> Iterator[GroupsV1 | GroupsV2]:
    """Have control groups with `limits` for a block; at its end, whoever is still in them is killed. Raises NoBox."""
    if os.geteuid() != 0:
        raise NoBox("a box takes root, as control groups and the disk's settings do")
    name = f"{PREFIX}{os.getpid()}"
    made = GroupsV2(name) if (GROUPS / "cgroup.controllers").exists() else GroupsV1(name)
    try:
        try:
            for folder in made.folders:
                _remove_left_over(folder.parent)
                folder.mkdir()
            made.limit(limits)
        except OSError as error:
            raise NoBox(f"no control group can be made: {error}") from error
        yield made
    finally:
        for folder in made.folders:
            _remove(folder)


@contextlib.contextmanager
def shared_setting(setting: Path, state: Path, value: int) -> Iterator[None]:
    """Have `setting`, a file of the kernel's, at `value` for a block; of all who do so at once, the last restores it.

    state: a file that all of them know; it holds the usual value meanwhile, also after one of them was killed.
    """

    def is_alone(users: int) -> bool:
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    with state.open("a+") as users, Path(f"{state}-gate").open("a") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        if is_alone(users.fileno()) and state.stat().st_size == 0:
            state.write_text(setting.read_text())
        fcntl.flock(users, fcntl.LOCK_SH)
        _write(setting, value)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(gate, fcntl.LOCK_EX)
            if is_alone(users.fileno()):
                _write(setting, state.read_text())
                users.truncate(0)


def read_ahead(device: str, kilobytes: int) -> contextlib.AbstractContextManager[None]:
    """Return what has the disk `device` read ahead so far for a block."""
    setting = Path(f"/sys/dev/block/{device}").resolve() / "queue" / "read_ahead_kb"
    return shared_setting(setting, Path("/run") / f"{PREFIX}read-ahead-{device.replace(':', '-')}", kilobytes)


def disk_of(path: Path) -> str | None:
    """Return the `major:minor` of the whole disk that holds `path`, None where no block device does."""
    device = path.stat().st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not node.exists():
        return None
    node = node.resolve()
    return ((node.parent if (node / "partition").exists() else node) / "dev").read_text().strip()


def drop_caches() -> None:
    """Have the kernel forget every page that it can read again."""
    os.sync()
    _write(Path("/proc/sys/vm/drop_caches"), 3)


def run(command: Sequence[str], limits: Limits, cores: set[int] | None, is_cold: bool) -> Figures:
    """Run `command` in a box, and return what it took. SIGTERM is passed on; Ctrl-C reaches the command by itself."""
    libc = ctypes.CDLL(None)
    with groups(limits) as made:

        def enter() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would end it, where this program is killed
            for folder in made.folders:
                _write(folder / "cgroup.procs", os.getpid())
            if cores:
                os.sched_setaffinity(0, cores)

        if is_cold:
            drop_caches()
        started = time.monotonic()
        process = subprocess.Popen(command, preexec_fn=enter)  # noqa: PLW1509 (this process has one thread)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        status = process.wait()
        wall_s = round(time.monotonic() - started, 3)
        return Figures(wall_s, status, limits.memory_bytes, **made.figures())  # type: ignore[arg-type]


def boxed(
    command: Sequence[str],
    *,
    memory: int | str | None = None,
    disk_mbps: float | None = None,
    readahead_kb: int | None = None,
    cold: Path | Sequence[Path] | None = None,
    disk: Path | None = None,
    cpus: float | None = None,
) -> list[str]:
    """Return the command line that runs `command` in a box with these limits.

    cold: what is read anew, and whose disks are limited. disk: a file whose disk is limited too.
    """
    flags = {"memory": memory, "disk-mbps": disk_mbps, "readahead-kb": readahead_kb, "cpus": cpus}
    given = [f"--{name}={value}" for name, value in flags.items() if value]
    given += [f"--cold={path}" for path in ([cold] if isinstance(cold, Path) else cold or ())]
    given += [f"--disk={disk}"] if disk else []
    return [sys.executable, str(Path(__file__).resolve()), *given, "--", *command]


def main(arguments: Sequence[str]) -> int:
    """Run what the command line says, print the figures, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=parse_size, metavar="SIZE")
    parser.add_argument("--disk-mbps", type=float, metavar="N", help="reads, in 10^6 bytes a second")
    parser.add_argument("--readahead-kb", type=int, metavar="N", help="128 is what most devices have")
    parser.add_argument("--cores", type=lambda text: {int(core) for core in text.split(",")}, metavar="0,1")
    parser.add_argument("--cpus", type=float, metavar="N", help="seconds of computing a second, of whatever cores")
    parser.add_argument("--cold", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--disk", type=Path, metavar="FILE", help="whose disk is meant, and nothing is dropped")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    flags, command = parser.parse_args(arguments[:cut]), list(arguments[cut + 1 :])
    if not command:
        parser.error("put the command after --")
    try:
        files = [*flags.cold, *([flags.disk] if flags.disk else [])] or [Path()]
        disks = tuple(dict.fromkeys(disk for path in files if (disk := disk_of(path))))
        if not disks and (flags.disk_mbps or flags.readahead_kb):
            raise NoBox("no block device holds the file: neither its speed nor its read-ahead can be set")
        limits = Limits(flags.memory, int(flags.disk_mbps * 1e6) if flags.disk_mbps else None, disks, flags.cpus)
        with contextlib.ExitStack() as settings:
            for disk in disks if flags.readahead_kb else ():
                settings.enter_context(read_ahead(disk, flags.readahead_kb))
            figures = run(command, limits, flags.cores, is_cold=bool(flags.cold))
    except (EdgeRunError, OSError, subprocess.SubprocessError) as error:
        print(f"edgebox: {error}", file=sys.stderr)
        return NO_BOX
    print(json.dumps(dataclasses.asdict(figures)), file=sys.stderr)
    return figures.exit if figures.exit >= 0 else 128 - figures.exit


def _own_places() -> Iterator[tuple[str, str]]:
    """Yield each controller of version 1 with this process's group under it, relative to the controller's root."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, place = line.split(":", 2)
        for controller in controllers.split(","):
            root = GROUPS / controller
            yield controller, place.lstrip("/") if (root / place.lstrip("/")).is_dir() else ""


def _remove_left_over(parent: Path) -> None:
    """Remove the groups of boxes that were killed, where nobody is in them."""
    for folder in parent.glob(f"{PREFIX}*"):
        process = folder.name.removeprefix(PREFIX)
        if process.isdecimal() and not Path("/proc", process).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _remove(folder: Path) -> None:
    """Remove a group after killing whoever is in it; it stays busy for a moment after its last process has ended."""
    for _ in range(REMOVAL_TRIES if folder.exists() else 0):
        for process in _text(folder / "cgroup.procs").split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(REMOVAL_WAIT_S)


def _write(path: Path, value: object) -> None:
    path.write_text(str(value))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _pairs(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in _text(path).splitlines())}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
