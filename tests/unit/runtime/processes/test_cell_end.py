"""The end of a cell whose process cannot be ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import warnings

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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")
def test_a_fork_that_closes_what_a_thread_is_using_does_not_wait() -> None:
    """The fork's copy of the lock is held, and no thread is there to let go of it."""
    cell = Cell("time")
    with cell._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which this is about
        if not (child := os.fork()):
            signal.alarm(10)
            cell.close()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    cell.close()
