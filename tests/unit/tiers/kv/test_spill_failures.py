"""Rows in a file whose drive refuses or hangs, and passes that are stopped: nothing is lost, and nothing stays behind.

A piece that is away is unreadable, so tests run in child processes.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from edge_run.base.errors import Cancelled, TierReadError
from edge_run.base.interrupt import go_on
from edge_run.tiers.kv.spill_states import PieceState
from in_child import in_child
from spill_rig import Rig, rig_in


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
        assert states >= {PieceState.FULL, PieceState.KEPT}
        assert PieceState.SAVING not in states
        rig.spill.texts[0].check()
        rig.file.write = real  # type: ignore[method-assign]
        rig.run(300)
        rig.run(1)
        assert PieceState.KEPT not in {rig.spill.texts[0].state(p) for p in range(len(rig.spill.texts[0].pieces))}


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
        assert not rig.spill._writes
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
            for write in rig.spill._writes.values():
                write.wait(go_on)

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
