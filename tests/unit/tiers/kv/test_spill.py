"""Rows on real memory and a real file: what attentions find is what was written, whatever was away in between.

A piece that is away is unreadable, so tests run in child processes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edge_run.base.errors import Cancelled, TierReadError
from edge_run.tiers import _libc
from edge_run.tiers.kv.cells import Cells, CellTensor
from edge_run.tiers.kv.spill import Spill
from edge_run.tiers.kv.spill_file import SpillFile
from edge_run.tiers.kv.spill_shape import SpillShape
from edge_run.tiers.kv.spill_states import RowState
from edge_run.tiers.readers import Readers
from in_child import in_child

PAGE = _libc.PAGE
N_CELLS, WIDTH = 3000, 300
CELL_BYTES = (96, 64, 96, 64, 200, 96)  # the last two: of an attention with one tensor, and of one that reads another's
USES = ((0, 1), (2, 3), (4,), (0, 5))


class Rig:
    """A context of some tensors, one after the other in memory, and the text whose rows are in them."""

    def __init__(self, folder: Path, attentions: int) -> None:
        size = sum(N_CELLS * n for n in CELL_BYTES) + 64
        self.base, self.length = _libc.map_anonymous(-(-size // PAGE) * PAGE + PAGE), -(-size // PAGE) * PAGE + PAGE
        at, tensors = self.base + 64, []
        for cell_bytes in CELL_BYTES:
            tensors.append(CellTensor(at, N_CELLS, cell_bytes))
            at += N_CELLS * cell_bytes
        self.cells, self.tensors = Cells(tensors, PAGE), tensors
        self.readers, self.file = Readers(3), SpillFile(folder)
        shape = SpillShape(self.cells, USES, 2 * PAGE, WIDTH, attentions)
        ranges = [(self.base + PAGE, self.length - 2 * PAGE)]
        self.checks_left: int | None = None
        self.spill = Spill(shape, ranges, 0, self.file, self.readers, self._check)
        self.random, self.n_rows = np.random.default_rng(0), 0
        self.wanted = [np.zeros((N_CELLS, n), np.uint8) for n in CELL_BYTES]

    def run(self, n_rows: int) -> int:
        """A pass over so many rows more: each attention writes its own, and reads all. Return what was held before."""
        stop = self.n_rows + n_rows
        self.spill.cut(0, self.n_rows)
        held = self.spill.settle([self.n_rows], self.cells.bytes_for(stop))
        for number, use in enumerate(USES):
            for tensor in use:
                self.wanted[tensor][self.n_rows : stop] = self.random.integers(0, 256, (n_rows, CELL_BYTES[tensor]))
                self._rows(tensor)[self.n_rows : stop] = self.wanted[tensor][self.n_rows : stop]
            self.spill.begin(use)
            for tensor in use:
                assert np.array_equal(self._rows(tensor)[:stop], self.wanted[tensor][:stop]), (number, tensor)
            n_ahead = self.spill._shape.attentions
            self.spill.end([USES[(number + 1 + k) % len(USES)] for k in range(n_ahead)])
        self.n_rows = stop
        self.spill.texts[0].check()
        return held

    def cut(self, n_rows: int) -> None:
        self.n_rows = n_rows

    def _check(self) -> None:
        if self.checks_left == 0:
            raise Cancelled("stopped")
        self.checks_left = self.checks_left and self.checks_left - 1

    def wait_for_reads(self) -> None:
        """Wait until nothing is on its way."""
        pieces = [piece for _, some in self.spill._ahead for piece in some]
        self.spill._weights.acquire(pieces)
        self.spill._weights.release(pieces)

    def _rows(self, tensor: int) -> np.ndarray:
        place = self.tensors[tensor]
        memory = _libc.view(place.address, N_CELLS * place.cell_bytes)
        return np.ndarray((N_CELLS, place.cell_bytes), np.uint8, buffer=memory)

    def resident_bytes(self) -> int:
        """What is there: of what may be read, the pages with memory."""
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        places = ((*(int(x, 16) for x in line[0].split("-")), line[1]) for line in lines)
        inside = ((max(a, self.base), min(b, self.base + self.length)) for a, b, kind in places if kind[0] == "r")
        return sum(_libc.resident_bytes(a, b - a) for a, b in inside if a < b)


@contextmanager
def rig_in(folder: Path, attentions: int = 1) -> Iterator[Rig]:
    rig = Rig(folder, attentions)
    yield rig
    rig.readers.close()
    rig.file.close()
    _libc.unmap(rig.base, rig.length)


@pytest.mark.parametrize("attentions", [1, 2])
@in_child
def test_texts_that_grow_and_are_cut(attentions: int, tmp_path: Path) -> None:
    with rig_in(tmp_path, attentions) as rig:
        for widths, cut in (([300, 300, 1, 1, 299, 300], 640), ([1, 300], 641), ([300, 17], 3), ([300] * 9, 0)):
            for width in widths:
                rig.run(width)
            assert rig.spill.away_bytes > (0.5 if rig.n_rows > 300 else 0) * rig.n_rows * sum(CELL_BYTES) * 0.5
            rig.cut(cut)
        rig.run(1)
        assert rig.spill.away_bytes == 0
        assert os.fstat(rig.file._fd).st_size == 0, "the drive has its room back"


@in_child
def test_memory_is_as_promised_and_each_byte_is_written_once(tmp_path: Path) -> None:
    with rig_in(tmp_path) as rig:
        room = rig.spill._shape.least_bytes(N_CELLS)
        assert room < 0.6 * rig.cells.bytes_for(N_CELLS)
        rig.spill.room_bytes = room
        most = 0
        while rig.n_rows < N_CELLS:
            held = rig.run(min(100, N_CELLS - rig.n_rows))
            assert held <= room
            most = max(most, rig.resident_bytes())
            assert most <= held + 2 * PAGE, "and what the kernel says"
        assert most > 0.8 * room
        written = rig.file.written_bytes
        assert written <= 1.05 * N_CELLS * sum(CELL_BYTES)
        rig.cut(2000)
        rig.run(1)
        assert rig.file.written_bytes == written
        rig.cut(1000)
        rig.run(1)
        assert rig.spill.away_bytes == 0, "there is room for all of it again"
        while rig.n_rows < 2500:
            rig.run(100)
        assert rig.file.written_bytes < written + 1600 * sum(CELL_BYTES), "what comes back need not be written again"


@pytest.mark.parametrize("attentions", [1, 2])
@in_child
def test_a_pass_reads_once_what_is_away(attentions: int, tmp_path: Path) -> None:
    """It begins with what the pass before has read ahead, and reads as much ahead itself."""
    with rig_in(tmp_path, attentions) as rig:
        for width in (300, 300, 300, 1, 1):
            rig.run(width)
        rig.wait_for_reads()
        before = rig.file.read_bytes
        rig.run(1)
        rig.wait_for_reads()
        n_read = (rig.file.read_bytes - before) / rig.spill._shape.piece_bytes
        assert 0.7 * rig.spill.texts[0].n_away < n_read <= rig.spill.texts[0].n_away, "frames that are idle keep some"


@in_child
def test_what_the_drive_refuses_stays_in_memory(tmp_path: Path) -> None:
    with rig_in(tmp_path) as rig:
        rig.run(300)
        real, calls = rig.file.write, [0]

        def write(address: int, length: int, offset: int) -> None:
            calls[0] += 1
            if calls[0] % 3 == 2:
                raise TierReadError("full", errno=errno.ENOSPC)
            real(address, length, offset)

        rig.file.write = write  # type: ignore[method-assign]
        with pytest.raises(TierReadError, match="full"):
            rig.run(1)
        assert calls[0] > 3, "all that was begun is waited for"
        states = {rig.spill.texts[0].state(piece) for piece in range(len(rig.spill.texts[0].pieces))}
        assert states >= {RowState.FULL, RowState.KEPT}
        assert RowState.SAVING not in states
        rig.spill.texts[0].check()
        rig.file.write = real  # type: ignore[method-assign]
        rig.run(300)
        rig.run(1)
        assert RowState.KEPT not in {rig.spill.texts[0].state(p) for p in range(len(rig.spill.texts[0].pieces))}


@in_child
def test_what_cannot_be_read_back_is_tried_again(tmp_path: Path) -> None:
    """After a cut, and in an attention: the text stays, and the same pass succeeds later."""
    with rig_in(tmp_path) as rig:
        for _ in range(4):
            rig.run(300)
        real = rig.file.read_into

        def fail(address: int, length: int, offset: int) -> int:
            raise TierReadError("broken", errno=errno.EIO)

        rig.file.read_into = fail  # type: ignore[method-assign]
        rig.spill.abandon()
        with pytest.raises(TierReadError, match="broken"):
            rig.run(1)
        rig.spill.abandon()
        rig.cut(777)
        for _ in range(2):
            with pytest.raises(TierReadError, match="broken"):
                rig.run(1)
        assert rig.spill.texts[0].coming
        rig.cut(640)
        rig.file.read_into = real  # type: ignore[method-assign]
        rig.run(300)
        rig.run(300)


@in_child
def test_a_stop_while_pieces_come_back(tmp_path: Path) -> None:
    """Wherever it comes, the next pass finds all that counts."""
    with rig_in(tmp_path, attentions=2) as rig:
        for n_checks in range(4):
            while rig.n_rows < 901:  # the last pass finds 900 rows that may go
                rig.run(min(300, max(1, 900 - rig.n_rows)))
            rig.cut(777)
            rig.checks_left = n_checks
            with pytest.raises(Cancelled):
                rig.run(1)
            rig.checks_left = None
            rig.run(1)


@in_child
def test_a_pass_that_goes_another_way(tmp_path: Path) -> None:
    """What was read ahead for the expected one does not keep this one from its rows."""
    with rig_in(tmp_path, attentions=2) as rig:
        for _ in range(4):
            rig.run(300)
        for use in (USES[2], USES[1], USES[3], USES[0]):
            rig.spill.begin(use)
            for tensor in use:
                assert np.array_equal(rig._rows(tensor)[: rig.n_rows], rig.wanted[tensor][: rig.n_rows])
            rig.spill.end()
        rig.run(1)
