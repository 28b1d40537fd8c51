"""The thread that writes blocks: whatever fails, it says so, and takes what is submitted."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from edge_run.runtime.keeping import writer
from edge_run.runtime.keeping.identity import KeptIdentity
from edge_run.runtime.keeping.store import PromptStore
from edge_run.runtime.keeping.writer import BlockToWrite, BlockWriter
from edge_run.tiers.kv.block_file import RowsHead
from edge_run.tiers.kv.cells import CellTensor
from edge_run.tiers.kv.layout import BLOCK_ROWS, KvLayout
from edge_run.tiers.kv.saving import SavingBlocks


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError(28, "No space left on device"), "No space left on device"), (MemoryError(), "MemoryError")],
)
def test_whatever_fails_is_said_and_nothing_adds_up(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(part: object) -> bytes:
        raise error

    monkeypatch.setattr(writer, "copy_part", fail)
    rows = np.zeros(3 * BLOCK_ROWS * 8, np.uint8)
    layout, states = KvLayout([CellTensor(rows.ctypes.data, 3 * BLOCK_ROWS, 8)]), SavingBlocks()
    store = PromptStore(tmp_path, KeptIdentity(bytes(16), {"library": "", "path": "", "file": ""}), 1 << 20)
    ours = BlockWriter(store, layout, states)
    jobs = states.completed(range(3))
    head = RowsHead(bytes(16), tuple(range(BLOCK_ROWS)), layout.row_bytes(BLOCK_ROWS))
    for job in jobs:
        ours.submit(BlockToWrite(job, head, [store.path_of(bytes(16), job.block)]))
    ours.close()
    assert ours.failure == reason
    assert ours._queue.empty()
    assert not list(tmp_path.rglob("*.rows"))


class Written:
    """A writer of blocks whose memory is given, and a clock that is set."""

    def __init__(self, folder: Path, daily_bytes: int = 1 << 30) -> None:
        self.now_s = 0.0
        self.rows = np.zeros(3 * BLOCK_ROWS * 8, np.uint8)
        layout = KvLayout([CellTensor(self.rows.ctypes.data, 3 * BLOCK_ROWS, 8)])
        self.states = SavingBlocks()
        self.store = PromptStore(folder, KeptIdentity(bytes(16), {"library": "", "path": "", "file": ""}), 1 << 20)
        self.store.daily.most_bytes = daily_bytes
        self.writer = BlockWriter(self.store, layout, self.states, lambda: self.now_s)
        self.head = RowsHead(bytes(16), tuple(range(BLOCK_ROWS)), layout.row_bytes(BLOCK_ROWS))
        self.folder = folder

    def save(self) -> int:
        """Have all blocks saved that are not; return how many files there are."""
        self.writer.resume()
        if not self.writer.is_resting:
            for job in self.states.completed(range(3)):
                self.writer.submit(BlockToWrite(job, self.head, [self.store.path_of(bytes(16), job.block)]))
        self.writer.close()
        return len(list(self.folder.rglob("*.rows")))


def test_after_a_failure_all_is_written_some_minutes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks too that were submitted before, without which later ones are of no use."""
    one = Written(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_rows", fail_as_full)
        assert one.save() == 0
    assert one.writer.failure == "No space left on device"
    one.now_s = writer.REST_S - 1
    assert one.save() == 0
    one.now_s = writer.REST_S
    assert not one.writer.is_resting
    assert one.writer.failure == "No space left on device", "whoever only asks changes nothing"
    assert one.save() == 3
    assert not one.writer.failure


def fail_as_full(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_limit_for_the_day_ends_with_the_day(tmp_path: Path) -> None:
    one = Written(tmp_path, daily_bytes=0)
    assert one.save() == 0
    assert "(prompt_cache_daily=)" in one.writer.failure
    one.store.daily.most_bytes, one.now_s = 1 << 30, writer.REST_S
    assert one.save() == 3


def test_at_the_limit_of_the_day_nothing_is_removed_in_vain(tmp_path: Path) -> None:
    one = Written(tmp_path)
    assert one.save() == 3
    kept = sorted(tmp_path.rglob("*.rows"))
    full = PromptStore(tmp_path, KeptIdentity(bytes(16), {"library": "", "path": "", "file": ""}), one.head.file_bytes)
    full.daily.most_bytes = full.daily.written_bytes
    other = BlockWriter(full, KvLayout([]), SavingBlocks())
    assert not other.write([full.path_of(bytes([1] * 16), 0)], one.head, iter(()))
    assert "(prompt_cache_daily=)" in other.failure
    assert sorted(tmp_path.rglob("*.rows")) == kept


def test_a_folder_that_another_process_removed_is_made_anew(tmp_path: Path) -> None:
    """A prompt that comes then is kept as it is read for the first time."""
    one, own = Written(tmp_path), tmp_path / bytes(16).hex()
    assert one.save() == 3
    shutil.rmtree(own)
    one.states.cut(0)
    assert one.save() == 3
    assert (own / "about.json").exists()
    assert not one.writer.failure


def test_what_continues_rows_that_another_process_removed_is_written_after_them(tmp_path: Path) -> None:
    one, own = Written(tmp_path), tmp_path / bytes(16).hex()
    assert one.save() == 3
    shutil.rmtree(own)
    one.states.cut(2 * BLOCK_ROWS)
    (job,) = one.states.completed(range(3))
    paths = [one.store.path_of(bytes(16), block) for block in range(3)]
    one.writer.submit(BlockToWrite(job, one.head, paths))
    one.writer.close()
    assert not list(tmp_path.rglob("*.rows"))
    assert one.save() == 3


def test_a_drive_that_is_unmounted_is_not_made_up_for(tmp_path: Path) -> None:
    one = Written(tmp_path / "prompts")
    shutil.rmtree(tmp_path / "prompts")
    assert one.save() == 0
    assert one.writer.failure == "No such file or directory"
    assert not list(tmp_path.iterdir())


def test_a_drive_that_takes_nothing_is_not_waited_for_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, answers = Written(tmp_path), threading.Event()
    monkeypatch.setattr(writer, "HANG_S", 0.1)
    monkeypatch.setattr(writer, "write_rows", lambda *_: answers.wait(20) and 0)
    try:
        assert one.save() == 0
        assert one.writer.failure == "the drive does not answer"
    finally:
        answers.set()
