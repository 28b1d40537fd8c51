"""Pieces of a model on a disk, whatever ends the process or the device between any two steps: what counts is true.

The disk here loses, in part or wholly and in any order, what was written and not synced.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_run.base.errors import ModelFileError, TierReadError
from edge_run.tiers import partial as module
from edge_run.tiers import pieces as pieces_module
from edge_run.tiers.partial import JOURNAL, PartialModel
from edge_run.tiers.pieces import Pieces

SIZES = (64 * 9 + 5, 64 * 4)
TRUTH = [random.Random(shard).randbytes(size) for shard, size in enumerate(SIZES)]
MODEL = "m" * 64


class PowerLoss(Exception):
    """The device is off."""


class Disk:
    """Stands in for `os` in the module: keeps account of what is on the disk for sure, and is off after some steps."""

    def __init__(self, steps: int, draw: random.Random) -> None:
        self._left, self._draw = steps, draw
        self._paths: dict[int, Path] = {}
        self._durable: dict[Path, bytearray] = {}
        self._pending: dict[Path, list[tuple[int, bytes]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        descriptor = os.open(path, flags, mode)
        if Path(path).is_file():
            self._paths[descriptor] = Path(path)
            self._durable[Path(path)] = bytearray(Path(path).read_bytes())
            self._pending[Path(path)] = []
        return descriptor

    def ftruncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)
        content = self._durable[self._paths[descriptor]]
        content[:] = content[:size].ljust(size, b"\0")

    def pwrite(self, descriptor: int, data: bytes, offset: int) -> int:
        self._step()
        data = bytes(data)[: self._draw.randint(1, len(data))]  # a write may be short
        self._pending[self._paths[descriptor]].append((offset, data))
        return os.pwrite(descriptor, data, offset)

    def fdatasync(self, descriptor: int) -> None:
        self._step()
        path = self._paths[descriptor]
        self._durable[path] = bytearray(path.read_bytes())
        self._pending[path].clear()

    def fsync(self, descriptor: int) -> None:
        """Of folders; what is in them is on the disk at once here."""

    def punch(self, descriptor: int, offset: int, length: int) -> None:
        self._step()
        length = max(0, min(length, os.fstat(descriptor).st_size - offset))
        os.pwrite(descriptor, bytes(length), offset)
        self._pending[self._paths[descriptor]].append((offset, bytes(length)))

    def _step(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise PowerLoss

    def lose(self) -> None:
        """Leave the files as a power loss may: of what was not synced, any part."""
        for path, content in self._durable.items():
            for offset, data in self._pending[path]:
                start = self._draw.randint(0, len(data))
                stop = self._draw.choice([start, len(data), self._draw.randint(start, len(data))])
                part = data[start:stop]
                content.extend(bytes(max(0, offset + stop - len(content))) if part else b"")
                content[offset + start : offset + stop] = part
            path.write_bytes(content)


def truth(pieces: Pieces, piece: int) -> bytes:
    place = pieces.place(piece)
    return TRUTH[place.shard][place.offset : place.offset + place.length]


def check(partial: PartialModel) -> None:
    """What counts as here is what it should be."""
    pieces = partial.pieces
    for piece in set(range(pieces.count)) - set(partial.missing(range(pieces.count))):
        place = pieces.place(piece)
        with partial.paths[place.shard].open("rb") as file:
            file.seek(place.offset)
            assert file.read(place.length) == truth(pieces, piece)


def run(folder: Path, steps: int, seed: int, act: Callable[[PartialModel, random.Random], None]) -> None:
    draw = random.Random(seed)
    disk = Disk(steps, draw)
    patch = pytest.MonkeyPatch()
    patch.setattr(pieces_module, "PIECE_BYTES", 64)
    patch.setattr(module, "os", disk)
    patch.setattr(module._libc, "punch_hole", disk.punch)
    partial = None
    try:
        partial = PartialModel(folder, MODEL, Pieces(SIZES))
        check(partial)
        act(partial, draw)
    except PowerLoss:
        disk.lose()
    finally:
        if partial is not None:
            partial.close()
        patch.undo()


def some_work(partial: PartialModel, draw: random.Random) -> None:
    for _ in range(6):
        missing = partial.missing(range(partial.pieces.count))
        for piece in draw.sample(missing, min(len(missing), 4)):
            partial.write(piece, truth(partial.pieces, piece))
        if draw.random() < 0.8:
            partial.sync()
            check(partial)
        if draw.random() < 0.4:
            partial.give_up(draw.sample(range(partial.pieces.count), 3))
            check(partial)
        if draw.random() < 0.4:
            partial.free_missing()
            check(partial)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(crashes=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2**32)), min_size=1, max_size=4))
def test_what_the_journal_says_is_true(tmp_path_factory: pytest.TempPathFactory, crashes: Any) -> None:
    folder = tmp_path_factory.mktemp("partial")
    for steps, seed in crashes:
        run(folder, steps, seed, some_work)

    def finish(partial: PartialModel, draw: random.Random) -> None:
        for piece in partial.missing(range(partial.pieces.count)):
            partial.write(piece, truth(partial.pieces, piece))
        partial.sync()
        assert not partial.missing(range(partial.pieces.count))
        check(partial)

    run(folder, 10**6, 0, finish)
    run(folder, 10**6, 0, lambda partial, draw: partial.check(0, 0, SIZES[0]))


@pytest.fixture
def partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PartialModel:
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", 64)
    partial = PartialModel(tmp_path / "m", MODEL, Pieces(SIZES))
    for piece in range(partial.pieces.count):
        partial.write(piece, truth(partial.pieces, piece))
    partial.sync()
    return partial


def test_a_file_that_is_gone_or_cut_counts_for_nothing(partial: PartialModel) -> None:
    partial.close()
    for spoil in (partial.paths[1].unlink, lambda: os.truncate(partial.paths[0], 10), partial.paths[0].unlink):
        spoil()
        again = PartialModel(partial.folder, MODEL, Pieces(SIZES))
        assert len(again.missing(range(again.pieces.count))) == again.pieces.count
        for piece in range(again.pieces.count):
            again.write(piece, truth(again.pieces, piece))
        again.sync()
        again.close()


def test_where_files_have_no_holes_nothing_is_given_up(partial: PartialModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on exFAT and NFSv3: what could not be freed would count as missing, and its room as taken."""

    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(module._libc, "punch_hole", refuse)
    journal = (partial.folder / JOURNAL).read_bytes()
    partial.give_up([])
    with pytest.raises(
        TierReadError, match=r"m: no part of a file can be freed .*not supported.*cache_folder="
    ) as caught:
        partial.give_up(range(partial.pieces.count))
    assert caught.value.errno == errno.EOPNOTSUPP
    assert not partial.missing(range(partial.pieces.count))
    assert (partial.folder / JOURNAL).read_bytes() == journal
    partial.close()
    partial.paths[0].unlink()  # so that all of them are missing
    again = PartialModel(partial.folder, MODEL, Pieces(SIZES))
    again.free_missing()
    assert again.paths[1].stat().st_blocks
    again.close()


def test_what_a_sync_that_failed_has_said_counts_no_more_once_its_room_is_freed(
    partial: PartialModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fdatasync, journal = os.fdatasync, partial._journal

    def refuse(descriptor: int) -> None:
        if descriptor == journal:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fdatasync(descriptor)

    partial.give_up([0])
    partial.write(0, truth(partial.pieces, 0))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", refuse)
        with pytest.raises(TierReadError, match="Input/output error"):
            partial.sync()
    partial.free_missing()
    partial.close()
    again = PartialModel(partial.folder, MODEL, Pieces(SIZES))
    assert again.missing(range(again.pieces.count)) == [0]
    again.close()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_syncs_no_folders(partial: PartialModel, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    partial.close()
    again = PartialModel(partial.folder, MODEL, Pieces(SIZES))
    assert not again.missing(range(again.pieces.count))
    again.close()


def test_a_file_system_that_takes_no_advice(partial: PartialModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    pieces = range(partial.pieces.count)
    partial.give_up(pieces)
    for piece in pieces:
        partial.write(piece, truth(partial.pieces, piece))
    partial.sync()
    assert not partial.missing(pieces)
    partial.close()


def test_a_journal_of_another_model_counts_for_nothing(partial: PartialModel) -> None:
    partial.close()
    other = PartialModel(partial.folder, "n" * 64, Pieces(SIZES))
    assert len(other.missing(range(other.pieces.count))) == other.pieces.count
    other.close()


@given(at=st.integers(0, 400), bit=st.integers(0, 7))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_journal_with_a_wrong_bit_says_nothing_wrong(partial: PartialModel, at: int, bit: int) -> None:
    partial.close()
    journal = partial.folder / JOURNAL
    content = bytearray(journal.read_bytes())
    saved = bytes(content)
    content[at % len(content)] ^= 1 << bit
    journal.write_bytes(content)
    again = PartialModel(partial.folder, MODEL, Pieces(SIZES))
    there = again.pieces.count - len(again.missing(range(again.pieces.count)))
    again.close()
    journal.write_bytes(saved)
    assert there < again.pieces.count
    check(again)


def test_what_is_not_there_is_not_read(partial: PartialModel) -> None:
    partial.check(1, 0, SIZES[1])
    partial.give_up([partial.pieces.count - 1])
    partial.check(1, 0, 64 * 3)
    for offset, length in ((0, SIZES[1]), (64 * 3, 1), (64 * 3 - 1, 2), (64 * 3, 10_000)):
        with pytest.raises(ModelFileError, match="not fetched"):
            partial.check(1, offset, length)
    partial.close()
