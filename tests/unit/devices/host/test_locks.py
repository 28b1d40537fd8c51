"""Files of living processes: which of them count, on one machine and where several share a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_run.base import process_ids
from edge_run.devices.host.locks import LivingFile, read_living


@pytest.fixture
def gone() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def held_by(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> LivingFile:
    """A file that is locked, as process `number` names it."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: number)
        return LivingFile(folder, "user-", b"in use")


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_process_is_looked_for_on_its_own_machine_only(
    tmp_path: Path, gone: int, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first namespace of processes has the same number everywhere."""
    boot = tmp_path / "boot_id"
    boot.write_text("11111111-1111-1111-1111-111111111111\n")
    monkeypatch.setattr(process_ids, "_BOOT", boot, raising=False)
    folder = tmp_path / "shared"
    folder.mkdir()
    file = held_by(gone, folder, monkeypatch)
    if not is_ours:
        boot.write_text("22222222-2222-2222-2222-222222222222\n")
    assert list(read_living(folder, "user-")) == ([] if is_ours else [b"in use"])
    assert bool(list(folder.iterdir())) is not is_ours
    monkeypatch.setattr(file, "_pid", os.getpid())
    file.remove()
    assert list(read_living(folder, "user-")) == []
