"""Keeps what was measured on this device in a file for each device and library, so that it is measured once.

A figure holds for 30 days, or for ten minutes where other programs were busy or memory was short while it was measured.
A file that is not exactly as this version writes it counts as none.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from edge_run.base.errors import reason_of
from edge_run.base.files.identity import FileIdentity
from edge_run.base.files.whole import whole_file
from edge_run.base.profile import DeviceProfile, DiskProfile, KernelSpeed, RepackedSpeed
from edge_run.base.strict_json import decode, parse
from edge_run.devices.host.mount import Mount, find_mount

FORMAT_VERSION = 4
LIFETIME, DISTURBED_LIFETIME = timedelta(days=30), timedelta(minutes=10)
CLOCK_ERROR = timedelta(days=1)  # a figure from later than this is of a clock that was wrong
MOST_FILE_BYTES = 4 << 20

logger = logging.getLogger(__name__)

Key = tuple[Any, ...]


def utc_now() -> datetime:
    """Return the time of day, in UTC."""
    return datetime.now(timezone.utc)


@dataclass(frozen=True, slots=True)
class MeasuredSetup:
    """What a device's figures depend on.

    cpu: the name of its processor.
    architecture: the instruction set.
    cores: the logical cores that this process may use.
    quota: how many of them it has the time of.
    library: the build of llama.cpp.
    """

    cpu: str
    architecture: str
    cores: int
    quota: float
    library: str

    @property
    def file_name(self) -> str:
        """What a file is called that holds for this setup alone."""
        digest = hashlib.sha256(json.dumps(dataclasses.astuple(self)).encode()).hexdigest()
        return f"{digest[:16]}.json"


@dataclass(frozen=True, slots=True)
class PassOverheads:
    """What a pass of `threads` threads costs besides weights, as in `DeviceProfile`."""

    threads: int
    node_s: float
    stop_s: float
    attention_flops_per_s: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Figure(ABC):
    """Something that was measured.

    measured_at: when, in ISO 8601, UTC.
    is_disturbed: whether others were at work then, or had left too little memory to measure in.
    """

    measured_at: str
    is_disturbed: bool

    @property
    @abstractmethod
    def key(self) -> Key:
        """What it was measured on."""


@dataclass(frozen=True, slots=True)
class KernelFigure(Figure):
    """The speed of a kernel."""

    speed: KernelSpeed

    @property
    def key(self) -> Key:
        """What it was measured on."""
        speed = self.speed
        return speed.type_name, speed.row_elements, speed.tokens, speed.by_expert, speed.threads


@dataclass(frozen=True, slots=True)
class RepackedFigure(KernelFigure):
    """The speed of a repacked kernel.

    speed: the speed.
    is_there: else there is no such kernel for the weights, and the speed says nothing.
    """

    speed: RepackedSpeed
    is_there: bool


@dataclass(frozen=True, slots=True)
class CostsFigure(Figure):
    """The costs of a pass."""

    costs: PassOverheads

    @property
    def key(self) -> Key:
        """What it was measured on."""
        return (self.costs.threads,)


@dataclass(frozen=True, slots=True)
class DiskFigure(Figure):
    """The speed of a disk.

    volume: the number of its file system, as in `Mount`.
    """

    volume: str
    disk: DiskProfile

    def __post_init__(self) -> None:
        if not self.disk.reads:
            raise ValueError(f"{self.disk.folder}: a disk without a speed")

    @property
    def key(self) -> Key:
        """What it was measured on."""
        disk = self.disk
        return disk.device, disk.file_system, disk.limit, disk.is_direct, self.volume, disk.reads[0].readers

    def holds_for(self, mount: Mount, readers: int) -> bool:
        """Return whether this is a measurement of `mount` by so many readers."""
        disk, found = self.disk, Mount(self.disk.device, self.disk.file_system, self.volume, self.disk.limit)
        return found == mount and disk.reads[0].readers == readers


@dataclass(frozen=True, slots=True)
class GpuKernelFigure(Figure):
    """The speed of a kernel on the GPU of that name.

    is_there: else it has no such kernel, and the speed says nothing.
    """

    gpu: str
    speed: KernelSpeed
    is_there: bool

    @property
    def key(self) -> Key:
        """What it was measured on."""
        return self.gpu, self.speed.type_name, self.speed.row_elements, self.speed.tokens, self.speed.by_expert


@dataclass(frozen=True, slots=True)
class GpuCosts:
    """What a pass on a GPU costs besides weights, as in `GpuProfile`."""

    upload_bytes_per_s: float
    node_s: float
    border_s: float
    attention_flops_per_s: tuple[float, float]


@dataclass(frozen=True, slots=True)
class GpuCostsFigure(Figure):
    """The costs of a pass on the GPU of that name."""

    gpu: str
    costs: GpuCosts

    @property
    def key(self) -> Key:
        """What it was measured on."""
        return (self.gpu,)


@dataclass(frozen=True, slots=True)
class Measurements:
    """Dated figures of one device, in any order; of those with one key the last counts."""

    kernels: tuple[KernelFigure, ...] = ()
    costs: tuple[CostsFigure, ...] = ()
    disks: tuple[DiskFigure, ...] = ()
    gpu_kernels: tuple[GpuKernelFigure, ...] = ()
    gpu_costs: tuple[GpuCostsFigure, ...] = ()
    repacked: tuple[RepackedFigure, ...] = ()

    def with_later(self, later: Measurements) -> Measurements:
        """Return both, `later` in place of what it measured again."""
        return Measurements(*map(_latest, self._by_kind(), later._by_kind()))

    def fresh_at(self, now: datetime) -> Measurements:
        """Return what is not too old. Raises ValueError for a date that is none."""

        def is_fresh(figure: Figure) -> bool:
            age = now - datetime.fromisoformat(figure.measured_at)
            return -CLOCK_ERROR <= age <= (DISTURBED_LIFETIME if figure.is_disturbed else LIFETIME)

        return Measurements(*(tuple(filter(is_fresh, figures)) for figures in self._by_kind()))

    def _by_kind(self) -> list[tuple[Any, ...]]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _latest(known: Iterable[Figure], later: Iterable[Figure]) -> tuple[Any, ...]:
    return tuple({figure.key: figure for figure in (*known, *later)}.values())


@dataclass(frozen=True, slots=True)
class _Content:
    """A file of the store."""

    format_version: int
    identity: MeasuredSetup
    measurements: Measurements


@functools.lru_cache(maxsize=1)
def _content(path: Path, identity: FileIdentity, changed_ns: int) -> _Content:
    """Return what the file at `path` says in that state: an opening asks several times, and reading it takes long."""
    return decode(_Content, parse(path.read_bytes()))


class ProfileStore:
    """Measurements in files under `cache_folder`. Several processes may use one folder: files are replaced whole.

    `problem` says why the last save failed, empty when it did not: a cache that cannot be written is no error.
    """

    def __init__(self, cache_folder: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._folder, self._now = cache_folder / "profiles", now
        self._lock = threading.Lock()
        self.problem = ""

    def load(self, identity: MeasuredSetup) -> Measurements:
        """Return what is known of the device and not too old; nothing where its file is missing or not ours."""
        path = self._folder / identity.file_name
        try:
            status = path.stat()
            if status.st_size > MOST_FILE_BYTES:
                return Measurements()
            content = _content(path, FileIdentity.of(status), status.st_ctime_ns)
            if (content.format_version, content.identity) != (FORMAT_VERSION, identity):
                return Measurements()
            return content.measurements.fresh_at(self._now())
        except FileNotFoundError:
            return Measurements()
        except (OSError, ValueError, TypeError) as error:
            logger.info("%s: measured again, the file is not usable: %s", path, error)
            return Measurements()

    def save(self, identity: MeasuredSetup, measured: Measurements) -> bool:
        """Add `measured` to what is known of the device; return whether that could be written.

        Of two processes at once, one may undo what the other saved in the same moment, and nothing else.
        """
        with self._lock:
            try:
                known = self.load(identity).with_later(measured)
                text = json.dumps(dataclasses.asdict(_Content(FORMAT_VERSION, identity, known)), indent=1)
                self._folder.mkdir(parents=True, exist_ok=True)
                with whole_file(self._folder / identity.file_name, 0o600) as draft:
                    draft.write_text(text, encoding="utf-8")
            except OSError as error:
                self.problem = f"{self._folder}: cannot be written ({reason_of(error)}); measured again next time"
                logger.info("%s", self.problem)
                return False
        self.problem = ""
        return True


def disk_of(profile: DeviceProfile, path: Path) -> DiskProfile | None:
    """Return the disk of `profile` that holds `path` under the limits of this process.

    None where the profile has none, or `path` cannot be looked at.
    """
    try:
        mount = find_mount(path)
    except OSError:
        return None
    names = (mount.device, mount.file_system, mount.limit)
    found = [disk for disk in profile.disks if (disk.device, disk.file_system, disk.limit) == names]
    there = (disk for disk in found if len(found) > 1 and _is_on(mount, disk.folder))  # two drives of one name
    return next(there, found[0] if found else None)


def _is_on(mount: Mount, folder: str) -> bool:
    try:
        return find_mount(Path(folder)) == mount
    except OSError:  # it was removed since
        return False
