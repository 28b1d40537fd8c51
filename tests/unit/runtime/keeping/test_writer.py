"""The thread that writes blocks: whatever fails, it says so, and takes what is submitted."""

from __future__ import annotations

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
