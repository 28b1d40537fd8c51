"""Rows on real memory and a real file: what attentions find is what was written, whatever was away in between.

A piece that is away is unreadable, so tests run in child processes.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
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
    """A context of some tensors, one after the other in memory, and the texts whose rows are in them.

    Most tests have one text, in a single stream.
    """

    def __init__(self, folder: Path, attentions: int, n_streams: int = 1) -> None:
        size = sum(n_streams * N_CELLS * n for n in CELL_BYTES) + 64
        self.base, self.length = _libc.map_anonymous(-(-size // PAGE) * PAGE + PAGE), -(-size // PAGE) * PAGE + PAGE
        at, tensors = self.base + 64, []
        for cell_bytes in CELL_BYTES:
            tensors.append(CellTensor(at, n_streams * N_CELLS, cell_bytes))
            at += n_streams * N_CELLS * cell_bytes
        self.cells = Cells(tensors, PAGE, n_streams)
        self.readers, self.file = Readers(3), SpillFile(folder)
        shape = SpillShape(self.cells, USES, 2 * PAGE, WIDTH, attentions)
        ranges = [(self.base + PAGE, self.length - 2 * PAGE)]
        self.checks_left: int | None = None
        self.spill = Spill(shape, ranges, 0, self.file, self.readers, self._check)
        self.random, self.ends = np.random.default_rng(0), [0] * n_streams
        self.wanted = [np.zeros((n_streams, N_CELLS, n), np.uint8) for n in CELL_BYTES]

    @property
    def n_rows(self) -> int:
        """The rows of the first text."""
        return self.ends[0]

    def run(self, n_rows: int, texts: range = range(1)) -> int:
        """A pass over so many rows more of each of `texts`; return what was held before.

        Each attention writes its own rows, and reads all of these texts.
        """
        stops = [end + n_rows * (text in texts) for text, end in enumerate(self.ends)]
        for text, end in enumerate(self.ends):
            self.spill.cut(text, end)
        full = sum(one.bytes_for(stop) for one, stop in zip(self.cells.streams, stops, strict=True))
        held = self.spill.settle(self.ends, full)
        self.spill.read_of(texts)
        for number, use in enumerate(USES):
            for tensor in use:
                for text in texts:
                    new = slice(self.ends[text], stops[text])
                    self.wanted[tensor][text, new] = self.random.integers(0, 256, (n_rows, CELL_BYTES[tensor]))
                    self._rows(tensor, text)[new] = self.wanted[tensor][text, new]
            self.spill.begin(use)
            for tensor in use:
                for text in texts:
                    found = self._rows(tensor, text)[: stops[text]]
                    assert np.array_equal(found, self.wanted[tensor][text, : stops[text]]), (number, tensor, text)
            n_ahead = self.spill._shape.attentions
            self.spill.end([USES[(number + 1 + k) % len(USES)] for k in range(n_ahead)])
        self.ends = stops
        for states in self.spill.texts:
            states.check()
        return held

    def cut(self, n_rows: int, text: int = 0) -> None:
        self.ends[text] = n_rows

    def _check(self) -> None:
        if self.checks_left == 0:
            raise Cancelled("stopped")
        self.checks_left = self.checks_left and self.checks_left - 1

    def wait_for_reads(self) -> None:
        """Wait until nothing is on its way."""
        pieces = [piece for _, some in self.spill._ahead for piece in some]
        self.spill._weights.acquire(pieces)
        self.spill._weights.release(pieces)

    def _rows(self, tensor: int, text: int = 0) -> np.ndarray:
        place = self.cells.streams[text].tensors[tensor]
        memory = _libc.view(place.address, N_CELLS * place.cell_bytes)
        return np.ndarray((N_CELLS, place.cell_bytes), np.uint8, buffer=memory)

    def resident_bytes(self) -> int:
        """What is there: of what may be read, the pages with memory."""
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        places = ((*(int(x, 16) for x in line[0].split("-")), line[1]) for line in lines)
        inside = ((max(a, self.base), min(b, self.base + self.length)) for a, b, kind in places if kind[0] == "r")
        return sum(_libc.resident_bytes(a, b - a) for a, b in inside if a < b)


@contextmanager
def rig_in(folder: Path, attentions: int = 1, n_streams: int = 1) -> Iterator[Rig]:
    rig = Rig(folder, attentions, n_streams)
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


def check_stops(rig: Rig) -> None:
    """Check that passes can be stopped at once, one after the other."""
    rig.checks_left = 3
    began_s = time.monotonic()
    for _ in range(2):
        with pytest.raises(Cancelled):
            rig.run(1)
    assert time.monotonic() - began_s < 10
    rig.checks_left = None


@pytest.mark.parametrize("n_rows", [300, 100, 0])
@in_child
def test_a_stop_while_a_folder_hangs(n_rows: int, tmp_path: Path) -> None:
    """It ends the wait at once; what is written late counts as far as it is still what it was."""
    with rig_in(tmp_path) as rig:
        rig.run(300)
        real, answers = rig.file.write, threading.Event()

        def write(address: int, length: int, offset: int) -> None:
            assert answers.wait(20)
            real(address, length, offset)

        rig.file.write = write  # type: ignore[method-assign]
        check_stops(rig)
        rig.cut(n_rows)
        answers.set()
        for _ in range(3):
            rig.run(300)
        assert not rig.spill.texts[0].is_writing
        rig.cut(0)
        rig.run(1)
        assert os.fstat(rig.file._fd).st_size == 0


@in_child
def test_a_stop_while_a_folder_hangs_from_which_pieces_come_back(tmp_path: Path) -> None:
    with rig_in(tmp_path, attentions=2) as rig:
        while rig.n_rows < 901:
            rig.run(min(300, max(1, 900 - rig.n_rows)))
        rig.cut(777)
        real, answers = rig.file.read_into, threading.Event()

        def read_into(address: int, length: int, offset: int) -> int:
            assert answers.wait(20)
            return real(address, length, offset)

        rig.file.read_into = read_into  # type: ignore[method-assign]
        check_stops(rig)
        rig.cut(640)
        answers.set()
        for _ in range(2):
            rig.run(130)


@in_child
def test_a_drive_may_have_a_bad_moment_while_pieces_come_back(tmp_path: Path) -> None:
    with rig_in(tmp_path, attentions=2) as rig, pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge_run.tiers.source.PAUSE_S", 0.01)
        while rig.n_rows < 901:
            rig.run(min(300, max(1, 900 - rig.n_rows)))
        rig.cut(777)
        real, failures = rig.file.read_into, [errno.EIO]

        def read_into(address: int, length: int, offset: int) -> int:
            if failures:
                raise TierReadError("the drive is reset", errno=failures.pop())
            return real(address, length, offset)

        rig.file.read_into = read_into  # type: ignore[method-assign]
        rig.run(1)
        assert not failures


@pytest.mark.parametrize("is_late", [False, True])
@in_child
def test_what_is_written_after_a_stop_does_not_stay_when_its_text_ends(is_late: bool, tmp_path: Path) -> None:
    """Whether it is written before the text ends, or while the next one grows."""
    with rig_in(tmp_path, n_streams=2) as rig:
        rig.run(300, range(2))
        real, answers = rig.file.write, threading.Event()

        def write(address: int, length: int, offset: int) -> None:
            assert answers.wait(20)
            real(address, length, offset)

        def let_end() -> None:
            answers.set()
            while rig.spill._written.qsize() < n_writing:
                time.sleep(0.002)

        rig.file.write = write  # type: ignore[method-assign]
        rig.checks_left = 1
        with pytest.raises(Cancelled):
            rig.run(1, range(2))
        rig.checks_left, rig.spill.room_bytes = None, 1 << 40
        n_writing = sum(len(states._writing) for states in rig.spill.texts)
        assert n_writing
        if not is_late:
            let_end()
        for text in range(2):
            rig.cut(0, text)
        rig.run(1)
        if is_late:
            let_end()
            rig.run(1)
        assert os.fstat(rig.file._fd).st_blocks == 0


@in_child
def test_a_pass_that_goes_another_way(tmp_path: Path) -> None:
    """What was read ahead for the expected one does not keep this one from its rows."""
    with rig_in(tmp_path, attentions=2) as rig:
        for _ in range(4):
            rig.run(300)
        for use in (USES[2], USES[1], USES[3], USES[0]):
            rig.spill.begin(use)
            for tensor in use:
                assert np.array_equal(rig._rows(tensor)[: rig.n_rows], rig.wanted[tensor][0, : rig.n_rows])
            rig.spill.end()
        rig.run(1)


@pytest.mark.parametrize("attentions", [1, 2])
@in_child
def test_texts_side_by_side(attentions: int, tmp_path: Path) -> None:
    """They grow in passes of some of them, are cut and end, in all the room there is and in none, and reads fail."""
    chance, n_streams, n_failed = random.Random(attentions), 4, 0
    with rig_in(tmp_path, attentions, n_streams) as rig:
        real = {call: getattr(rig.file, call) for call in ("write", "read_into")}

        def refuse(*_: int) -> int:
            raise TierReadError("refused", errno=errno.EIO)

        for _ in range(120):
            rig.spill.room_bytes = chance.choice([0, 300_000, 1 << 40])
            first, text = chance.randrange(n_streams), chance.randrange(n_streams)
            texts = range(first, chance.randrange(first, n_streams) + 1)
            width = chance.choice([1, 1, 17, WIDTH])
            if max(rig.ends[texts.start : texts.stop]) + width > N_CELLS or chance.random() < 0.15:
                rig.cut(chance.choice([0, rig.ends[text] // 2, max(0, rig.ends[text] - 3)]), text)
                continue
            failing = chance.choice(list(real)) if chance.random() < 0.2 else ""
            if failing:
                setattr(rig.file, failing, refuse)
            try:
                rig.run(width, texts)
            except TierReadError:
                n_failed += 1
                rig.spill.abandon()
            if failing:
                setattr(rig.file, failing, real[failing])
        assert n_failed > 3
        assert rig.file.read_bytes > rig.file.written_bytes > 0
        for text in range(n_streams):
            rig.cut(0, text)
        rig.run(1)
        assert rig.spill.away_bytes == os.fstat(rig.file._fd).st_blocks == 0


@in_child
def test_a_text_that_ends_gives_its_part_of_the_file_back(tmp_path: Path) -> None:
    with rig_in(tmp_path, n_streams=3) as rig:
        for _ in range(8):
            rig.run(WIDTH, range(3))
        rig.run(1, range(3))
        before = os.fstat(rig.file._fd).st_blocks
        rig.cut(0, 1)
        rig.run(1, range(3))
        assert os.fstat(rig.file._fd).st_blocks == pytest.approx(2 / 3 * before, rel=0.05)
