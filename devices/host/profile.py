"""Keeps what was measured on this device in a file for each device and library, so that it is measured once.

A figure holds for 30 days, or for ten minutes where other programs were busy while it was measured. A file that is not
exactly as this version writes it counts as none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

from edge_run.base.profile import DeviceProfile, DiskProfile, KernelSpeed
from edge_run.base.strict_json import decode, parse
from edge_run.devices.host.mount import Mount, find_mount

FORMAT_VERSION = 2
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
    library: the version of llama.cpp.
    """

    cpu: str
    architecture: str
    cores: int
    library: str


@dataclass(frozen=True, slots=True)
class PassOverheads:
    """What a pass of `threads` threads costs besides weights, as in `DeviceProfile`."""

    threads: int
    node_s: float
    stop_s: float
    attention_flops_per_s: tuple[float, float]


@dataclass(frozen=True, slots=True)
class KernelFigure:
    """The speed of a kernel, when it was measured (ISO 8601, UTC), and whether others were at work then."""

    measured_at: str
    is_disturbed: bool
    speed: KernelSpeed

    @property
    def key(self) -> Key:
        """What it was measured on."""
        return (
            self.speed.type_name,
            self.speed.row_elements,
            self.speed.tokens,
            self.speed.by_expert,
            self.speed.threads,
        )


@dataclass(frozen=True, slots=True)
class CostsFigure:
    """The costs of a pass, measured as a `KernelFigure` is."""

    measured_at: str
    is_disturbed: bool
    costs: PassOverheads

    @property
    def key(self) -> Key:
        """What it was measured on."""
        return (self.costs.threads,)


@dataclass(frozen=True, slots=True)
class DiskFigure:
    """The speed of a disk, measured as a `KernelFigure` is.

    volume: the number of its file system, as in `Mount`.
    """

    measured_at: str
    is_disturbed: bool
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
class GpuKernelFigure:
    """The speed of a kernel on the GPU of that name, measured as a `KernelFigure` is.

    is_there: else it has no such kernel, and the speed says nothing.
    """

    measured_at: str
    is_disturbed: bool
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
class GpuCostsFigure:
    """The costs of a pass on the GPU of that name, measured as a `KernelFigure` is."""

    measured_at: str
    is_disturbed: bool
    gpu: str
    costs: GpuCosts

    @property
    def key(self) -> Key:
        """What it was measured on."""
        return (self.gpu,)


_Figure = TypeVar("_Figure", KernelFigure, CostsFigure, DiskFigure, GpuKernelFigure, GpuCostsFigure)


@dataclass(frozen=True, slots=True)
class Measurements:
    """Dated figures of one device, in any order; of those with one key the last counts."""

    kernels: tuple[KernelFigure, ...] = ()
    costs: tuple[CostsFigure, ...] = ()
    disks: tuple[DiskFigure, ...] = ()
    gpu_kernels: tuple[GpuKernelFigure, ...] = ()
    gpu_costs: tuple[GpuCostsFigure, ...] = ()

    def with_later(self, later: Measurements) -> Measurements:
        """Return both, `later` in place of what it measured again."""
        return Measurements(
            _latest((*self.kernels, *later.kernels)),
            _latest((*self.costs, *later.costs)),
            _latest((*self.disks, *later.disks)),
            _latest((*self.gpu_kernels, *later.gpu_kernels)),
            _latest((*self.gpu_costs, *later.gpu_costs)),
        )

    def fresh_at(self, now: datetime) -> Measurements:
        """Return what is not too old. Raises ValueError for a date that is none."""

        def fresh(figures: tuple[_Figure, ...]) -> tuple[_Figure, ...]:
            ages = [(now - datetime.fromisoformat(figure.measured_at), figure) for figure in figures]
            return tuple(
                figure
                for age, figure in ages
                if -CLOCK_ERROR <= age <= (DISTURBED_LIFETIME if figure.is_disturbed else LIFETIME)
            )

        return Measurements(
            fresh(self.kernels), fresh(self.costs), fresh(self.disks), fresh(self.gpu_kernels), fresh(self.gpu_costs)
        )


def _latest(figures: Iterable[_Figure]) -> tuple[_Figure, ...]:
    return tuple({figure.key: figure for figure in figures}.values())


@dataclass(frozen=True, slots=True)
class _Content:
    """A file of the store."""

    format_version: int
    identity: MeasuredSetup
    measurements: Measurements


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
        path = self._path(identity)
        try:
            if path.stat().st_size > MOST_FILE_BYTES:
                return Measurements()
            content = decode(_Content, parse(path.read_bytes()))
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
        draft = None
        with self._lock:
            try:
                known = self.load(identity).with_later(measured)
                text = json.dumps(dataclasses.asdict(_Content(FORMAT_VERSION, identity, known)), indent=1)
                self._folder.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(
                    "w", encoding="utf-8", dir=self._folder, suffix=".part", delete=False
                ) as file:
                    draft = Path(file.name)
                    file.write(text)
                draft.replace(self._path(identity))
            except OSError as error:
                self.problem = f"{self._folder}: cannot be written ({error.strerror}); measured again next time"
                logger.info("%s", self.problem)
                return False
            finally:
                if draft is not None:
                    with contextlib.suppress(OSError):
                        draft.unlink(missing_ok=True)
        self.problem = ""
        return True

    def _path(self, identity: MeasuredSetup) -> Path:
        digest = hashlib.sha256(json.dumps(dataclasses.astuple(identity)).encode()).hexdigest()
        return self._folder / f"{digest[:16]}.json"


def disk_of(profile: DeviceProfile, path: Path) -> DiskProfile | None:
    """Return the disk of `profile` that holds `path` under the limits of this process.

    None where the profile has none, or `path` cannot be looked at.
    """
    try:
        mount = find_mount(path)
    except OSError:
        return None
    return next(
        (
            disk
            for disk in profile.disks
            if (disk.device, disk.file_system, disk.limit) == (mount.device, mount.file_system, mount.limit)
        ),
        None,
    )
