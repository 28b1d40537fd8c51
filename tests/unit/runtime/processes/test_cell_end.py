"""The end of a cell whose process cannot be ended."""

from __future__ import annotations

import subprocess
import time

import pytest

from edge_run.runtime.processes.cell import Cell


def test_a_process_that_hangs_at_a_drive_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever asks next would wait for the drive too, with the lock of the cell."""
    left = list[subprocess.Popen[bytes]]()
    cell = Cell("time")

    def hang(child: subprocess.Popen[bytes]) -> None:
        left.append(child)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", hang)
        child = cell._started().process
        began_s = time.monotonic()
        cell.close()
        assert time.monotonic() - began_s < 20
    assert not cell._is_alive()
    assert left == [child]
    child.kill()
    child.wait()
