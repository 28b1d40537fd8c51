"""Rows on real memory and a real file: what attentions find is what was written, whatever was away in between.

A piece that is away is unreadable, so tests run in child processes.
"""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest

from edge_run.base.errors import TierReadError
from edge_run.tiers import weights
from in_child import in_child
from spill_rig import CELL_BYTES, N_CELLS, PAGE, USES, WIDTH, rig_in


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
    weights.PAUSE_S = 0.01  # type: ignore[attr-defined]  # many reads fail, each after a pause
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
