"""A shard and its copy: the same bytes whatever a drive does, and a line that says what it did."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edge_run.base.errors import ConfigError, ModelFileError, TierReadError
from edge_run.base.units import round_up
from edge_run.tiers import _libc
from edge_run.tiers.drives import copied_source, copy_check, stripes
from edge_run.tiers.drives.copied_source import CopiedSource, Drives
from edge_run.tiers.drives.copy_check import check_copy, find_copies
from edge_run.tiers.drives.lanes import PART_BYTES, Lane
from edge_run.tiers.gguf import read_gguf
from edge_run.tiers.source import SourceFile
from mapped import PAGE, content, write_random
from tiny_models import make_model, split_model

SIZE = 6 * PART_BYTES + 3 * PAGE + 123
WAIT_S = 30


class Pair:
    """A file and its copy, and memory as large; `refuse(path)` runs before each read of a file."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths = folder / "model.gguf", folder / "copy.gguf"
        self.data = write_random(self.paths[0], SIZE)
        shutil.copy(*self.paths)
        self.memory = _libc.map_anonymous(round_up(SIZE, PAGE))
        self.refuse: Callable[[Path], object] = lambda path: None
        self.reads = dict.fromkeys(self.paths, 0)
        self.is_read = {path: threading.Event() for path in self.paths}
        real = SourceFile.read_pieces

        def read_pieces(one: SourceFile, pieces: list[tuple[int, int]], offset: int) -> int:
            self.reads[one.path] += 1
            self.is_read[one.path].set()
            self.refuse(one.path)
            return real(one, pieces, offset)

        monkeypatch.setattr(SourceFile, "read_pieces", read_pieces)
        self.lines: list[str] = []
        self.drives = Drives(2)
        self.drives.tell(self.lines.append)
        self.source = CopiedSource(*self.paths, self.drives)

    def read_all(self) -> None:
        """Read it with two threads, in reads of one part and a page, and assert that it is right."""
        length = PART_BYTES + PAGE

        def read(offset: int) -> int:
            size = min(length, round_up(SIZE, PAGE) - offset)
            return self.source.read_into(self.memory + offset, size, offset)

        with ThreadPoolExecutor(2) as two:
            assert sum(two.map(read, range(0, SIZE, length))) == SIZE
        assert content(self.memory, SIZE) == self.data

    def wait_for(self, path: Path) -> None:
        """Wait until `path` is read: on a busy machine a first thread reads all else before a second one begins."""
        assert self.is_read[path].wait(WAIT_S)

    def wait_for_both(self, _: Path) -> None:
        for path in self.paths:
            self.wait_for(path)

    def close(self) -> None:
        self.source.close()
        self.drives.close()
        _libc.unmap(self.memory, round_up(SIZE, PAGE))


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    one = Pair(tmp_path, monkeypatch)
    yield one
    one.close()


def test_both_files_are_read(pair: Pair) -> None:
    pair.refuse = pair.wait_for_both
    pair.read_all()
    assert all(pair.reads.values())
    assert 0 < pair.drives.totals.copy_bytes < SIZE + PAGE
    assert pair.drives.totals.repeated_reads == 0
    assert pair.lines == []


@pytest.mark.parametrize("bad", [0, 1])
def test_what_fails_on_one_drive_is_read_again_from_the_other(pair: Pair, bad: int) -> None:
    def refuse(path: Path) -> None:
        if path == pair.paths[bad]:
            raise TierReadError(f"{path}: reading failed (Input/output error)")
        pair.wait_for(pair.paths[bad])

    pair.refuse = refuse
    for _ in range(2):
        pair.read_all()
    assert pair.drives.totals.repeated_reads >= 1
    assert pair.lines == [
        f"{pair.paths[bad]}: reading failed (Input/output error); read again from {pair.paths[1 - bad]}"
    ]


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("first_patience_s", [0.02, 1e6])
def test_a_drive_that_hangs_is_left_alone(
    pair: Pair, bad: int, first_patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as it is known how fast it is; what its reads bring in the end goes nowhere."""
    may_end, patience_s = threading.Event(), itertools.chain([first_patience_s] * 4, itertools.repeat(0.02))
    monkeypatch.setattr(stripes.Stripes, "patience_s", lambda *_: next(patience_s))
    monkeypatch.setattr(copied_source, "LEAST_PATIENCE_S", 0.02)

    def refuse(path: Path) -> None:
        if path == pair.paths[bad]:
            assert may_end.wait(WAIT_S)
        pair.wait_for(pair.paths[bad])

    pair.refuse = refuse
    pair.read_all()
    assert pair.drives.totals.repeated_reads >= 1
    assert f"{pair.paths[bad]}: the drive does not answer; read again from {pair.paths[1 - bad]}" in pair.lines
    written = b"\1" * SIZE
    _libc.view(pair.memory, SIZE)[:] = written
    may_end.set()
    while not all(map(pair.drives._stripes.is_answering, range(2))):
        threading.Event().wait(0.002)
    assert content(pair.memory, SIZE) == written
    pair.read_all()


def test_what_the_page_cache_lost_in_between_and_the_drive_fails_at_is_read_from_the_copy(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        if path == pair.paths[0]:
            raise TierReadError(f"{path}: reading failed (Input/output error)")

    pair.source.use_page_cache(keeps=False)
    monkeypatch.setattr(pair.source._cache, "holds", lambda *_, **__: True)
    pair.refuse = refuse
    pair.read_all()
    assert all(pair.reads.values())


def test_what_the_page_cache_does_not_hold_whole_is_read_from_both(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page that is missing is read from a drive, which may hang."""
    pair.source.use_page_cache(keeps=False)
    monkeypatch.setattr(pair.source._cache, "holds", lambda at, length, least_share=0.9: least_share < 1)
    pair.refuse = pair.wait_for_both
    pair.read_all()
    assert pair.drives.totals.copy_bytes > 0


def test_where_both_fail_the_read_fails(pair: Pair) -> None:
    def refuse(path: Path) -> None:
        raise TierReadError(f"{path}: no")

    pair.refuse = refuse
    with pytest.raises(TierReadError, match="no"):
        pair.source.read_into(pair.memory, PAGE, 0)
    pair.refuse = lambda path: None
    pair.read_all()


def test_a_file_that_was_cut_is_no_drive_that_fails(pair: Pair) -> None:
    os.truncate(pair.paths[1], PAGE)
    pair.refuse = pair.wait_for_both

    def read_on() -> None:
        for _ in range(4):
            pair.read_all()

    with pytest.raises(ModelFileError, match="cut while in use"):
        read_on()
    with pytest.raises(ModelFileError, match=r"copy\.gguf: the file changed"):
        pair.source.check_unchanged()


@pytest.mark.parametrize("bad", [{0}, {1}, {0, 1}])
def test_a_drive_that_does_not_say_whether_a_file_changed_is_gone_on_without(
    pair: Pair, bad: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As XFS after it was shut down, since its drive was pulled out."""
    bad_files, real = {pair.paths[one].stat().st_ino for one in bad}, os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        if status.st_ino in bad_files:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return status

    monkeypatch.setattr(os, "fstat", fstat)
    for _ in range(2):
        if len(bad) == 2:
            with pytest.raises(TierReadError, match=r"model\.gguf: asking whether it has changed: Input/output error"):
                pair.source.check_unchanged()
        else:
            pair.source.check_unchanged()
    lost = pair.paths[min(bad)]
    assert pair.lines[0].startswith(
        f"{lost}: asking whether it has changed: Input/output error; check the drive; gone on"
    )
    assert len(pair.lines) == len(bad)
    bad_files.clear()
    os.utime(lost, (0, 0))
    with pytest.raises(ModelFileError, match="the file changed"):
        pair.source.check_unchanged()


def test_a_drive_where_a_read_hangs_is_not_asked_whether_a_file_changed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stripes.Stripes, "is_answering", lambda _, drive: drive == 1)
    os.utime(pair.paths[0], (0, 0))
    pair.source.check_unchanged()
    os.utime(pair.paths[1], (0, 0))
    with pytest.raises(ModelFileError, match="the file changed"):
        pair.source.check_unchanged()


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, threads = set(os.listdir("/proc/self/fd")), {*threading.enumerate()}
    pair = Pair(tmp_path, monkeypatch)
    pair.read_all()
    pair.close()
    pair.drives.close()
    assert set(os.listdir("/proc/self/fd")) == files
    assert {*threading.enumerate()} <= threads
    assert not pair.drives._buffers


def test_threads_of_one_drive_end_where_those_of_the_other_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def lane(n_threads: int, drive: int) -> Lane:
        if drive == 1:
            raise RuntimeError("can't start new thread")
        return Lane(n_threads, drive)

    before = {*threading.enumerate()}
    monkeypatch.setattr(copied_source, "Lane", lane)
    with pytest.raises(RuntimeError, match="can't start"):
        Drives(4)
    assert {*threading.enumerate()} <= before


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model("llama", tmp_path)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda path: None, ""),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "bytes instead of"),
        (lambda path: flip(path, 100), "another header"),
        (lambda path: flip(path, path.stat().st_size - 1), "another content at byte"),
    ],
)
def test_copies_are_compared(
    model: Path, change: Callable[[Path], object], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file whole, and a large one, as which it is taken here, in samples and at its end."""
    copy = shutil.copy(model, model.with_name("copy.gguf"))
    shard = read_gguf(model).shards[0]
    change(copy)
    for sample_bytes in (copy_check.SAMPLE_BYTES, PAGE):
        monkeypatch.setattr(copy_check, "SAMPLE_BYTES", sample_bytes)
        monkeypatch.setattr(copy_check, "SAMPLES", 8)
        if found:
            with pytest.raises(ModelFileError, match=found):
                check_copy(shard, copy, random.Random(1))
        else:
            check_copy(shard, copy, random.Random(1))


def test_the_copy_that_was_compared_is_the_one_that_is_read(model: Path) -> None:
    """A job that copies may replace it by another one of the same length in between."""
    copy, shard = Path(shutil.copy(model, model.with_name("copy.gguf"))), read_gguf(model).shards[0]
    checked = check_copy(shard, copy)
    drives = Drives(2)
    CopiedSource(model, copy, drives, shard.identity, checked).close()
    other = Path(shutil.copy(model, model.with_name("other.gguf")))
    flip(other, other.stat().st_size - 1)
    other.replace(copy)
    with pytest.raises(ModelFileError, match=r"copy\.gguf: .*changed"):
        CopiedSource(model, copy, drives, shard.identity, checked)
    drives.close()


def test_shards_are_found_by_the_first_one_and_by_their_folder(model: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    shards = split_model(model, 3, tmp_path)
    copies = [Path(shutil.copy(shard, tmp_path / "other")) for shard in shards]
    gguf = read_gguf(shards[0])
    assert find_copies(gguf, copies[0]) == find_copies(gguf, tmp_path / "other") == copies
    with pytest.raises(ModelFileError, match="1 files, no copy"):
        find_copies(gguf, model)
    with pytest.raises(ConfigError, match="is the model itself"):
        find_copies(gguf, shards[0])


def test_buffers_are_counted() -> None:
    assert copied_source.buffer_bytes(4) >= 2 * 4 * PART_BYTES
