"""Measuring a disk: what is read, in which order, how the speed follows from it, and that nothing stays behind."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from control_groups import control_group
from edge_run.base.errors import TierReadError, options_as_flags
from edge_run.base.units import GIB, MIB
from edge_run.devices.host import disk, scratch
from edge_run.devices.host.disk import BLOCK_SIZES, UNIT_BYTES, Effort, ReadMeter, data_units, measure_disk, spread
from edge_run.devices.host.scratch import NoScratchError
from edge_run.tiers.source import SourceFile
from quick_probe import QUICK

SPEED = 500e6

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="disks are measured on Linux only")


def paced(times: list[float]) -> float:
    """Return what ReadMeter makes of blocks that end at `times`; fail when they are not enough for it."""
    meter = ReadMeter(Effort(), 4)
    for time_s in times:
        if meter.note(time_s, UNIT_BYTES):
            return meter.bytes_per_s
    raise AssertionError("it wanted more")


def test_steady_reads() -> None:
    assert paced([7 + i * UNIT_BYTES / SPEED for i in range(100)]) == pytest.approx(SPEED)


def test_reads_that_come_in_groups() -> None:
    """Four threads begin together and end together, and the last group may be cut."""
    for cut in range(4):
        times = [(i + cut) // 4 * 4 * UNIT_BYTES / SPEED for i in range(100)]
        assert paced(times) == pytest.approx(SPEED, rel=0.08)


def test_a_burst_at_the_beginning_does_not_count() -> None:
    saved_up = [i * UNIT_BYTES / 5e9 for i in range(6)]
    times = saved_up + [saved_up[-1] + (i + 1) * UNIT_BYTES / SPEED for i in range(60)]
    assert paced(times) == pytest.approx(SPEED, rel=0.02)


def test_a_fast_disk_ends_by_bytes_and_a_slow_one_by_reads() -> None:
    for speed, most_s in ((20e9, 0.05), (5e6, 25)):
        meter, now = ReadMeter(Effort(), 4), 0.0
        while not meter.note(now, UNIT_BYTES):
            now += UNIT_BYTES / speed
        assert now < most_s
        assert meter.bytes_per_s == pytest.approx(speed)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 32, 64, 1000])
def test_every_beginning_is_spread(count: int) -> None:
    order = spread(count)
    assert sorted(order) == list(range(count))
    for n in (8, 32):
        if count >= 8 * n:
            places = sorted(order[:n])
            gaps = [b - a for a, b in zip([0, *places], [*places, count], strict=True)]
            assert max(gaps) <= 3 * count / n


@pytest.mark.parametrize("n_units", [16, 24, 132])
@pytest.mark.parametrize("readers", [4, 16])
@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
def test_a_file_that_is_read_in_no_time_has_a_speed(n_units: int, readers: int, block_bytes: int) -> None:
    """A small model on a fast drive is over before either bound of the beginning that does not count."""
    deal = disk._Deal(range(0, n_units * UNIT_BYTES, UNIT_BYTES), Effort().most_bytes // UNIT_BYTES, readers)
    offsets = deal.next(block_bytes)
    meter = ReadMeter(Effort(most_bytes=deal.most_bytes), max(1, min(readers, len(offsets) // 4)))
    for number in range(len(offsets)):
        if meter.note(number * block_bytes / 20e9, block_bytes):
            break
    assert meter.bytes_per_s == pytest.approx(20e9)


def test_blocks_are_dealt_once_and_others_for_each_figure() -> None:
    deal = disk._Deal(range(0, 64 * UNIT_BYTES, UNIT_BYTES), 12, 4)
    seen: set[int] = set()
    for block_bytes in (*BLOCK_SIZES, UNIT_BYTES):
        offsets = deal.next(block_bytes)
        assert len(set(offsets)) == len(offsets) == 16 * UNIT_BYTES // block_bytes
        assert all(b != a + block_bytes for a, b in itertools.pairwise(offsets))
        units = {offset // UNIT_BYTES for offset in offsets}
        assert not units & seen
        seen |= units


def write(path: Path, *parts: int) -> Path:
    """Write a file: a positive part is so many bytes of data, a negative one a hole."""
    with path.open("wb") as file:
        for part in parts:
            if part > 0:
                file.write(os.urandom(MIB) * (part // MIB))
            else:
                file.seek(-part, os.SEEK_CUR)
        file.truncate()
    return path


def test_holes_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "model", 4 * MIB, -20 * MIB, 24 * MIB, -64 * MIB)
    if path.stat().st_blocks * 512 >= path.stat().st_size:
        pytest.skip("this file system has no holes")
    assert data_units(path) == [24 * MIB, 32 * MIB, 40 * MIB]
    assert data_units(write(tmp_path / "hole", -64 * MIB)) == []
    assert data_units(write(tmp_path / "empty")) == []


class Reads:
    """What SourceFile was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all: list[tuple[Path, int, int]] = []
        self.fails_with: BaseException | None = None
        real = SourceFile.read_into

        def read(source: SourceFile, address: int, length: int, offset: int) -> int:
            self.all.append((source.path, length, offset))
            if self.fails_with and len(self.all) > 20:
                raise self.fails_with
            return real(source, address, length, offset)

        monkeypatch.setattr(SourceFile, "read_into", read)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def assert_measured(profile: disk.DiskProfile, folder: Path, readers: int) -> None:
    assert profile.folder == str(folder).replace("\udce9", "\ufffd"), "which a store can keep"
    assert [read.block_bytes for read in profile.reads] == list(BLOCK_SIZES)
    assert {read.readers for read in profile.reads} == {readers}
    assert all(1e4 < speed < 1e12 for speed in (profile.first_use_bytes_per_s, *(r.bytes_per_s for r in profile.reads)))


def reader_threads() -> set[threading.Thread]:
    """Return those that read, of an engine of another test too, that is not closed yet."""
    return {thread for thread in threading.enumerate() if "reader" in thread.name}


@pytest.mark.parametrize("readers", [1, 4, 13])
def test_without_a_model_a_scratch_file_is_read(tmp_path: Path, reads: Reads, readers: int) -> None:
    before, folder = reader_threads(), tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    assert_measured(measure_disk(folder, None, readers, QUICK), folder, readers)
    assert {path for path, _, _ in reads.all} == {folder}
    assert {length for _, length, _ in reads.all} == set(BLOCK_SIZES)
    assert list(folder.iterdir()) == []
    assert reader_threads() <= before


def test_the_model_is_read_and_nothing_written(tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(tmp_path / "model.gguf", 72 * MIB)
    monkeypatch.setattr(disk, "scratch_file", None)
    assert_measured(measure_disk(tmp_path, model, 4, QUICK), tmp_path, 4)
    assert {path for path, _, _ in reads.all} == {model}
    for block_bytes in BLOCK_SIZES[:-1]:
        offsets = [offset for _, length, offset in reads.all if length == block_bytes]
        assert len(set(offsets)) == len(offsets)


def test_a_model_that_is_small_or_a_hole_does_not_count(tmp_path: Path, reads: Reads) -> None:
    for model in (write(tmp_path / "small", 16 * MIB), write(tmp_path / "hole", MIB, -GIB)):
        before = model.stat()
        assert_measured(measure_disk(tmp_path, model, 4, QUICK), tmp_path, 4)
        assert model.stat().st_mtime_ns == before.st_mtime_ns
    assert {path for path, _, _ in reads.all} == {tmp_path}


@pytest.mark.parametrize("error", [TierReadError("broken"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_nothing_stays_when_a_read_fails(tmp_path: Path, reads: Reads, error: BaseException) -> None:
    reads.fails_with, before = error, reader_threads()
    with pytest.raises(type(error)):
        measure_disk(tmp_path, None, 4, QUICK)
    assert list(tmp_path.iterdir()) == []
    assert reader_threads() <= before


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=["full", "Ctrl-C"]
)
def test_nothing_stays_when_a_write_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def write(descriptor: int, data: memoryview) -> int:
        assert list(tmp_path.iterdir()) == [], "it has lost its name before it is written"
        raise error

    monkeypatch.setattr(scratch.os, "write", write)
    with pytest.raises(TierReadError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        measure_disk(tmp_path, None, 4, QUICK)
    if isinstance(error, OSError):
        assert str(caught.value).count("\n") == 0
        assert "No space left on device" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_who_cannot_have_a_disk_measured_so_is_told_what_can_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`edge-run plan` and `Model` measure too, and are given neither folder nor another model."""
    monkeypatch.setattr(scratch, "_fill", MagicMock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(
        NoScratchError, match=r"another folder of it, .*, with probe\(\[FOLDER\]\) or probe\(model=FILE\)$"
    ):
        measure_disk(tmp_path, None, 4, QUICK)
    with (
        options_as_flags(dict),
        pytest.raises(NoScratchError, match=r"with `edge-run probe FOLDER` or `edge-run probe --model FILE`$"),
    ):
        measure_disk(tmp_path, None, 4, QUICK)


def test_a_disk_that_is_nearly_full_is_spared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = scratch.shutil.disk_usage(tmp_path)
    sizes = []
    monkeypatch.setattr(scratch, "_fill", lambda descriptor, size_bytes, patience_s: sizes.append(size_bytes) or 0)
    for free_bytes in (4 * GIB, GIB, 256 * MIB):
        monkeypatch.setattr(scratch.shutil, "disk_usage", lambda path, free=free_bytes: usage._replace(free=free))
        with scratch.scratch_file(tmp_path, 256 * MIB):
            pass
    assert sizes == [256 * MIB, 128 * MIB, 32 * MIB]
    monkeypatch.setattr(scratch.shutil, "disk_usage", lambda path: usage._replace(free=200 * MIB))
    with pytest.raises(
        TierReadError, match=r"needs 256 MiB free, 200 MiB are; free some space, .* with probe\(model=FILE\)$"
    ) as caught:
        measure_disk(tmp_path, None, 4, dataclasses.replace(QUICK, scratch_bytes=256 * MIB))
    assert (caught.value.found_bytes, caught.value.needed_bytes) == (200 * MIB, 256 * MIB)


def test_a_disk_that_is_slow_to_write_gets_a_smaller_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not written would be a hole, which is read in no time."""
    written = []
    monkeypatch.setattr(scratch.os, "fsync", lambda descriptor: written.append(time.sleep(0.01)))
    with scratch.scratch_file(tmp_path, 256 * MIB, patience_s=0) as source:
        assert source.size_bytes == scratch.LEAST_BYTES
    assert len(written) * scratch.PIECE_BYTES == scratch.LEAST_BYTES


def test_no_hole_of_a_scratch_file_is_read(tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = scratch.scratch_file
    monkeypatch.setattr(disk, "scratch_file", lambda folder, size_bytes: patient(folder, size_bytes, patience_s=0))
    measure_disk(tmp_path, None, 4, dataclasses.replace(QUICK, scratch_bytes=64 * MIB))
    assert max(offset + length for _, length, offset in reads.all) <= scratch.LEAST_BYTES


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(TierReadError, match="cannot be read"):
        measure_disk(tmp_path / "gone", None, 4, QUICK)


@contextmanager
def throttled(limit: int, device: str) -> Iterator[Path]:
    """Yield the folder of a control group whose processes read `device` at `limit` bytes a second at most."""
    new, old = {"io.max": f"{device} rbps={limit}"}, {"blkio.throttle.read_bps_device": f"{device} {limit}"}
    with control_group(new, "blkio", old) as group:
        yield group


def whole_device(path: Path) -> str:
    number = path.stat().st_dev
    node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if os.geteuid() != 0 or not node.exists():
        pytest.skip("needs root, and a block device under the folder for temporary files")
    node = node.resolve()
    return ((node.parent if (node / "partition").exists() else node) / "dev").read_text().strip()


@pytest.mark.root
def test_a_throttled_disk_is_seen_as_slow_as_it_is(tmp_path: Path) -> None:
    """No measurement may be faster; one that others disturb, which want the disk or the cores too, is made again."""
    limit = 100_000_000
    code = (
        "import dataclasses, sys; from pathlib import Path; from edge_run.devices.host.disk import *\n"
        "Path(sys.argv[2], 'cgroup.procs').write_text('0')\n"
        "while sys.stdin.readline():\n"
        "    profile = measure_disk(Path(sys.argv[1]), None, 4, dataclasses.replace(NORMAL, scratch_bytes=64 << 20))\n"
        "    print(profile.bytes_per_s, profile.first_use_bytes_per_s, profile.limit, flush=True)"
    )
    with throttled(limit, whole_device(tmp_path)) as group:
        command = [sys.executable, "-c", code, str(tmp_path), str(group)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin
            assert process.stdout
            slowest, end_s = 0.0, time.monotonic() + 90
            while slowest < 0.7 * limit:
                assert time.monotonic() < end_s, f"{slowest:,.0f} bytes/s at best, of {limit:,}"
                print(file=process.stdin, flush=True)
                *speeds, kernel_words = process.stdout.readline().split(maxsplit=2)
                assert str(limit) in kernel_words
                assert all(float(speed) < 1.4 * limit for speed in speeds)
                slowest = min(map(float, speeds))
            process.stdin.close()
