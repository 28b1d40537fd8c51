"""Measures how fast a disk is read here: past the page cache, in pieces of several sizes, as weights are read.

The model file itself is read where it lies on that disk and is long enough, else a scratch file. The first part of
each measurement does not count, because threads start in it and a throttled disk spends what it has saved up.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edge_run.base.config import CHUNK_BYTES
from edge_run.base.errors import NotSupported, TierReadError, reason_of
from edge_run.base.files.texts import as_text
from edge_run.base.profile import DiskProfile, ReadSpeed
from edge_run.base.units import KIB, MIB, round_up
from edge_run.devices.host.memory import available_bytes
from edge_run.devices.host.mount import find_mount
from edge_run.devices.host.scratch import scratch_file
from edge_run.tiers import _libc
from edge_run.tiers.readers import Readers
from edge_run.tiers.source import SourceFile
from edge_run.tiers.weights import MAX_READ_CHUNKS

UNIT_BYTES = MAX_READ_CHUNKS * CHUNK_BYTES
BLOCK_SIZES = (128 * KIB, MIB, UNIT_BYTES)
LEAST_MODEL_BYTES = 64 * MIB
FRESH_SHARE = 16  # of the memory that is available
LEAST_FRESH_UNITS = 8
LEAST_CPU_S = 1e-15


@dataclass(frozen=True, slots=True)
class Effort:
    """What a measurement may take: it ends after `duration_s` or `most_bytes`, and reads into `ring_bytes` of memory.

    skip_s: of the beginning, at most a quarter of most_bytes, that does not count.
    fresh_bytes: of new memory that are used at most; as many are used before, uncounted.
    """

    duration_s: float = 0.5
    skip_s: float = 0.1
    most_bytes: int = 512 * MIB
    ring_bytes: int = 64 * MIB
    fresh_bytes: int = 768 * MIB
    scratch_bytes: int = 256 * MIB


NORMAL = Effort()


def measure_disk(folder: Path, model: Path | None, readers: int, effort: Effort = NORMAL) -> DiskProfile:
    """Return how fast the disk that holds `folder` is read by `readers` threads at once.

    model: a file that is read if it is on that disk and has 64 MiB that are no hole; nothing is written then. No byte
    is read twice for one of the figures. Raises TierReadError, ModelFileError, or NotSupported where there is no
    Linux; nothing is left behind, also after KeyboardInterrupt.
    """
    if sys.platform != "linux":
        raise NotSupported(f"{folder}: how fast a disk is read can be measured on Linux only, this is {sys.platform}")
    try:
        mount = find_mount(folder)
    except OSError as error:
        raise TierReadError(f"{folder}: cannot be read ({reason_of(error)}); name another folder") from error
    with _opened(folder, model, effort) as (source, units), _memory(effort.ring_bytes) as ring:
        deal = _Deal(units, effort.most_bytes // UNIT_BYTES, readers)
        effort = replace(effort, most_bytes=min(effort.most_bytes, deal.most_bytes))
        reads, used_cpu = [], 0.0
        for block_bytes in BLOCK_SIZES:
            target = functools.partial(_used, ring, effort.ring_bytes // block_bytes, block_bytes)
            speed, used_cpu = _measure(source, deal.next(block_bytes), block_bytes, target, readers, effort)
            reads.append(ReadSpeed(block_bytes, readers, speed))
        n_units = max(LEAST_FRESH_UNITS, min(effort.fresh_bytes, available_bytes() // FRESH_SHARE) // UNIT_BYTES)
        with _new_memory(2 * n_units * UNIT_BYTES) as fresh:
            whole = replace(effort, most_bytes=n_units * UNIT_BYTES, duration_s=math.inf)

            def measure_half(area: int) -> tuple[float, float]:
                target = functools.partial(_unused, area)
                return _measure(source, deal.next(UNIT_BYTES, n_units), UNIT_BYTES, target, readers, whole)

            measure_half(fresh)  # what was freed a moment ago is given out first, and is quicker to have: not counted
            first_use, new_cpu = measure_half(fresh + n_units * UNIT_BYTES)
        return DiskProfile(
            folder=as_text(str(folder)),  # as it is kept
            device=mount.device,
            file_system=mount.file_system,
            is_direct=source.is_direct,
            limit=mount.limit,
            first_use_bytes_per_s=first_use,
            cpu_s_per_byte=(used_cpu, new_cpu),
            reads=tuple(reads),
        )


@contextlib.contextmanager
def _opened(folder: Path, model: Path | None, effort: Effort) -> Iterator[tuple[SourceFile, list[int]]]:
    """Yield a file on the disk of `folder`, and where in it there are UNIT_BYTES of data each."""
    if model is not None and model.stat().st_dev == folder.stat().st_dev:
        units = data_units(model)
        if len(units) * UNIT_BYTES >= LEAST_MODEL_BYTES:
            with contextlib.closing(SourceFile(model)) as source:
                yield source, units
            return
    with scratch_file(folder, effort.scratch_bytes) as source:
        yield source, list(range(0, source.size_bytes, UNIT_BYTES))


def data_units(path: Path) -> list[int]:
    """Return the offsets, multiples of UNIT_BYTES, from which on the file at `path` has UNIT_BYTES without a hole."""
    units: list[int] = []
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size, end = os.fstat(descriptor).st_size, 0
        while end < size:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
            units.extend(range(round_up(start, UNIT_BYTES), end - UNIT_BYTES + 1, UNIT_BYTES))
    except OSError:  # ENXIO: no data from here on
        pass
    finally:
        os.close(descriptor)
    return units


class _Deal:
    """Hands out blocks of a file to read, spread over the file, and other ones for each figure while there are any."""

    def __init__(self, units: Sequence[int], most_units: int, readers: int) -> None:
        order = spread(len(units))
        self._units = itertools.cycle([units[index] for index in order])
        # Beyond what counts, one unit for each reader, so that the last that counts are not read by fewer at a time.
        self._count = min(len(units), most_units + readers)
        self._spare = min(readers, self._count // 2)

    @property
    def most_bytes(self) -> int:
        """What of the blocks for a figure counts at most."""
        return (self._count - self._spare) * UNIT_BYTES

    def next(self, block_bytes: int, n_units: int = 0) -> list[int]:
        """Return offsets of the blocks in so many units; neighbours here are none in the file."""
        units = list(itertools.islice(self._units, n_units or self._count))
        parts = [index * block_bytes for index in spread(UNIT_BYTES // block_bytes)]
        return [unit + part for part in parts for unit in units]


def spread(count: int) -> list[int]:
    """Return 0 to count - 1 in an order of which every beginning is spread evenly, by steps of the golden section."""
    step = next(step for step in itertools.count(max(1, round(count * 0.618))) if math.gcd(step, count) == 1)
    return [index * step % count for index in range(count)]


@contextlib.contextmanager
def _memory(ring_bytes: int) -> Iterator[int]:
    """Yield the address of `ring_bytes` of memory in use, in huge pages where the kernel gives them."""
    length = ring_bytes + CHUNK_BYTES
    mapped = _libc.map_anonymous(length)
    try:
        ring = round_up(mapped, CHUNK_BYTES)
        _libc.advise_working_memory(ring, ring_bytes)
        _libc.view(ring, ring_bytes)[:: _libc.PAGE] = b"\1" * (ring_bytes // _libc.PAGE)
        yield ring
    finally:
        _libc.unmap(mapped, length)


def _used(ring: int, slots: int, block_bytes: int, number: int) -> int:
    """Return where block `number` goes. More readers than slots share them: nobody looks at the bytes."""
    return ring + number % slots * block_bytes


@contextlib.contextmanager
def _new_memory(size_bytes: int) -> Iterator[int]:
    """Yield the address of `size_bytes` bytes that are not there yet."""
    mapped = _libc.map_anonymous(size_bytes + CHUNK_BYTES, _libc.PROT_NONE)
    try:
        yield round_up(mapped, CHUNK_BYTES)
    finally:
        _libc.unmap(mapped, size_bytes + CHUNK_BYTES)


def _unused(area: int, number: int) -> int:
    """Return where unit `number` goes: to memory that is new, chunk by chunk, as a model's is."""
    address = area + number * UNIT_BYTES
    for chunk in range(address, address + UNIT_BYTES, CHUNK_BYTES):
        _libc.map_anonymous(CHUNK_BYTES, at=chunk)
        _libc.advise_working_memory(chunk, CHUNK_BYTES)
    return address


def _measure(
    source: SourceFile,
    offsets: Sequence[int],
    block_bytes: int,
    target: Callable[[int], int],
    readers: int,
    effort: Effort,
) -> tuple[float, float]:
    """Read blocks at `offsets`, in that order, until it is enough; return bytes per second and CPU seconds per byte."""
    meter = ReadMeter(effort, max(1, min(readers, len(offsets) // 4)))
    is_over, failures = threading.Event(), list[BaseException]()

    def read(number: int, offset: int) -> int:
        n_bytes = 0
        try:
            n_bytes = source.read_into(target(number), block_bytes, offset)
            is_enough = meter.note(time.monotonic(), n_bytes)
        except BaseException as error:
            failures.append(error)
            is_enough = True
        if is_enough or number == len(offsets) - 1:
            is_over.set()
        return n_bytes

    threads = Readers(readers)
    try:
        for number, offset in enumerate(offsets):
            threads.submit(functools.partial(read, number, offset))
        is_over.wait()
    finally:
        threads.close()
    if failures:
        raise failures[0]
    totals = threads.totals
    return meter.bytes_per_s, max(totals.cpu_s / totals.bytes_read, LEAST_CPU_S)


class ReadMeter:
    """Counts reads that end, says when there were enough, and how fast the reads came. Thread-safe.

    The bandwidth is the slope of the line of least squares through (time, bytes so far): reads of several threads come
    in groups, and a figure from the first and the last of them would be wrong by a group.
    """

    def __init__(self, effort: Effort, readers: int) -> None:
        self._effort, self._readers = effort, readers
        self._lock = threading.Lock()
        self._first_s = math.nan
        self._reads = self._bytes = 0
        self._points: list[tuple[float, int]] = []

    def note(self, now_s: float, n_bytes: int) -> bool:
        """Count a read of `n_bytes` that ended at `now_s`; return whether it is enough."""
        with self._lock:
            if self._reads == 0:
                self._first_s = now_s
            self._reads += 1
            self._bytes += n_bytes
            elapsed_s, most_bytes = now_s - self._first_s, self._effort.most_bytes
            is_late = elapsed_s >= self._effort.skip_s or self._bytes >= most_bytes // 4
            if self._points or (is_late and self._reads >= self._readers):
                self._points.append((elapsed_s, self._bytes))
            is_long = elapsed_s >= self._effort.duration_s or self._bytes >= most_bytes
            return is_long and len(self._points) > 2 * self._readers

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth of what was counted. Raises ValueError for fewer than two reads."""
        with self._lock:
            times, sums = zip(*self._points, strict=True)
        mean_s, mean_bytes = sum(times) / len(times), sum(sums) / len(sums)
        products = ((time_s - mean_s) * (n_bytes - mean_bytes) for time_s, n_bytes in zip(times, sums, strict=True))
        squares = ((time_s - mean_s) ** 2 for time_s in times)
        return float(sum(products) / max(sum(squares), 1e-18))
