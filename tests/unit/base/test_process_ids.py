"""Ids of processes: which of them run."""

from __future__ import annotations

import os
import subprocess
import sys

from edge_run.base.process_ids import is_running


def test_a_process_runs_until_it_was_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    assert is_running(process.pid)
    process.wait()
    assert not is_running(process.pid)


def test_a_process_of_another_user_runs_too() -> None:
    assert is_running(1)
    assert is_running(os.getpid())


def test_a_number_that_no_process_can_have_is_of_none() -> None:
    assert not is_running(1 << 40)
