"""Uploads: every byte where it belongs, whatever its size and place in the file; after failures too."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from edge_run import ModelFileError, TierReadError
from edge_run.tiers import _libc
from edge_run.tiers.readers import Readers
from edge_run.tiers.source import SourceFile
from edge_run.tiers.upload import PIECE_BYTES, Extent, Upload, cut_into_pieces
from mapped import content, write_random


class Device:
    """Memory elsewhere: what was put, by tensor."""

    def __init__(self) -> None:
        self.held: dict[int, bytearray] = {}

    def put(self, piece: Extent, address: int) -> None:
        held = self.held.setdefault(piece.tensor, bytearray())
        assert len(held) == piece.offset, "pieces of a tensor come in order"
        held += content(address, piece.length)


def extents_of(size_bytes: int, seed: int) -> list[Extent]:
    """Tensors of odd sizes at odd places, with gaps, in no order."""
    chance, place, found = random.Random(seed), chance_start(seed), []
    while place < size_bytes - 1:
        length = min(chance.choice([1, 33, 5000, 300_000, PIECE_BYTES, PIECE_BYTES + 1]), size_bytes - place)
        found.append(Extent(len(found), 0, place, length))
        place += length + chance.choice([0, 1, 4096])
    chance.shuffle(found)
    return found


def chance_start(seed: int) -> int:
    return random.Random(seed).choice([0, 1, 4095, 4097])


@pytest.mark.parametrize("seed", range(4))
def test_every_byte_arrives(tmp_path: Path, seed: int) -> None:
    data = write_random(tmp_path / "model", 24_000_001)
    source, readers, device = SourceFile(tmp_path / "model"), Readers(3), Device()
    extents = extents_of(len(data), seed)
    upload = Upload(extents, [source], readers, device.put)
    upload.finish()
    assert upload.is_done
    for extent in extents:
        assert device.held[extent.tensor] == data[extent.file_offset : extent.file_offset + extent.length]
    assert readers.totals.bytes_read < 1.2 * len(data) + 10_000 * len(extents)
    readers.close()
    upload.close()
    source.close()


def test_pieces_cover_extents() -> None:
    pieces = cut_into_pieces([Extent(7, 0, 1000, 25), Extent(8, 0, 10, 9)], piece_bytes=10)
    assert [(p.tensor, p.file_offset, p.length, p.offset) for p in pieces] == [
        (8, 10, 9, 0), (7, 1000, 10, 0), (7, 1010, 10, 10), (7, 1020, 5, 20)
    ]  # fmt: skip


def test_what_fails_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_random(tmp_path / "model", 20_000_000)
    source, readers, device = SourceFile(tmp_path / "model"), Readers(2), Device()
    real, failures = os.preadv, [3]

    def fail_sometimes(fd: int, buffers: Any, offset: int) -> int:
        if offset > 8_000_000 and failures[0]:
            failures[0] -= 1
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail_sometimes)
    monkeypatch.setattr("edge_run.tiers.source.PAUSE_S", 0.01)
    upload = Upload([Extent(0, 0, 123, 19_000_000)], [source], readers, device.put)
    for _ in range(4):
        try:
            upload.finish()
        except TierReadError:
            continue
    assert upload.is_done
    assert failures == [0]
    assert device.held[0] == data[123 : 123 + 19_000_000]
    readers.close()
    source.close()


def test_it_can_be_stopped_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_random(tmp_path / "model", 9_000_000)
    source, readers, device = SourceFile(tmp_path / "model"), Readers(1), Device()
    stopped, real = threading.Event(), source.read_into

    def read_once_stopped(address: int, length: int, offset: int) -> int:
        assert stopped.wait(20)
        return real(address, length, offset)

    def check() -> None:
        if not stopped.is_set():
            stopped.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(source, "read_into", read_once_stopped)
    upload = Upload([Extent(0, 0, 0, len(data))], [source], readers, device.put, check=check)
    readers.set_active(1)
    with pytest.raises(KeyboardInterrupt):
        upload.finish()
    assert not upload.is_done
    upload.finish()
    assert device.held[0] == data
    readers.close()
    upload.close()
    source.close()


def test_ctrl_c_while_a_piece_is_put_leaves_nobody_waiting(tmp_path: Path) -> None:
    data = write_random(tmp_path / "model", 9_000_000)
    source, readers, held = SourceFile(tmp_path / "model"), Readers(1), bytearray(9_000_000)
    stops = iter([False, True])

    def put(piece: Extent, address: int) -> None:
        held[piece.offset : piece.offset + piece.length] = content(address, piece.length)
        if next(stops, False):
            raise KeyboardInterrupt

    def check() -> None:
        assert time.monotonic() < until_s, "it waits for ever"

    until_s = time.monotonic() + 20
    upload = Upload([Extent(0, 0, 0, len(data))], [source], readers, put, check=check)
    with pytest.raises(KeyboardInterrupt):
        upload.finish()
    upload.finish()
    assert held == data
    readers.close()
    source.close()


def test_a_file_that_ends_before_a_piece_is_refused(tmp_path: Path) -> None:
    """Else what the slot held before would go to the device."""
    write_random(tmp_path / "model", 1_000_000)
    source, readers = SourceFile(tmp_path / "model"), Readers(1)
    upload = Upload([Extent(0, 0, 900_000, 200_000)], [source], readers, Device().put)
    with pytest.raises(ModelFileError, match="changed"):
        upload.finish()
    readers.close()
    upload.close()
    source.close()


def test_closed_before_it_is_done_it_leaves_nothing(tmp_path: Path) -> None:
    write_random(tmp_path / "model", 30_000_000)
    source, readers = SourceFile(tmp_path / "model"), Readers(2)
    before = Path("/proc/self/maps").read_text().count("\n")
    upload = Upload([Extent(0, 0, 0, 30_000_000)], [source], readers, Device().put)
    readers.close()
    upload.close()
    upload.close()
    assert Path("/proc/self/maps").read_text().count("\n") <= before + 1
    assert _libc.PAGE
    source.close()


def test_a_mistake_of_ours_does_not_leave_anybody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random(tmp_path / "model", 1_000_000)
    source, readers = SourceFile(tmp_path / "model"), Readers(1)

    def fail(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(SourceFile, "read_into", fail)
    upload = Upload([Extent(0, 0, 0, 1_000_000)], [source], readers, Device().put)
    with pytest.raises(TierReadError, match="ZeroDivisionError"):
        upload.finish()
    readers.close()
    upload.close()
    source.close()
