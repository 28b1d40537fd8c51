"""Drafts: who removes them, and when."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edge_run.base.files.drafts import abandoned_drafts, remove_abandoned_drafts, remove_drafts
from edge_run.base.files.whole import whole_file
from edge_run.base.process_ids import process_scope


def test_what_a_signal_ends_is_removed(tmp_path: Path) -> None:
    with whole_file(tmp_path / "model") as draft:
        remove_drafts()
        assert list(tmp_path.iterdir()) == []
        draft.touch()
    (tmp_path / "model").unlink()
    remove_drafts()


def test_a_fork_does_not_remove_what_its_parent_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with whole_file(tmp_path / "model") as draft:
        monkeypatch.setattr(os, "getpid", os.getppid)
        remove_drafts()
        assert draft.exists()


def test_drafts_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here, elsewhere = process_scope(), "0123abcd"
    left = [
        f".model.{gone.pid}-{here}-01234567.part",
        f".model.{os.getpid()}-{here}-01234567.part",
        f".model.{os.getppid()}-{elsewhere}-76543210.part",  # of hours ago, so its machine is gone
        f".model.{os.getppid()}-76543210.part",  # as the version before named them
    ]
    kept = [
        f".model.{gone.pid}-{here}-00000000.part",  # written to a moment ago
        f".model.{os.getppid()}-{here}-01234567.part",
        f".model.{gone.pid}-{elsewhere}-01234567.part",  # of a process of another machine, which is long at it
        f".other.{gone.pid}-{here}-01234567.part",
        f".model.{gone.pid}-{here}.part",
        ".model.part",
        "model",
    ]
    now = time.time()
    for name in (*left, *kept):
        (tmp_path / name).touch()
        age_s = 0 if name.endswith("00000000.part") else 7200 if name.endswith("76543210.part") else 1800
        os.utime(tmp_path / name, (now - age_s, now - age_s))
    remove_abandoned_drafts(tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    remove_abandoned_drafts(tmp_path / "nowhere" / "model")


def test_a_folder_that_another_machine_fills_is_left_alone(tmp_path: Path) -> None:
    draft = tmp_path / ".split.1-0123abcd-01234567.part"
    draft.mkdir()
    (draft / "weights").touch()
    os.utime(draft, (0, 0))
    remove_abandoned_drafts(tmp_path / "split")
    assert draft.exists()
    os.utime(draft / "weights", (0, 0))
    os.utime(draft, (0, 0))
    remove_abandoned_drafts(tmp_path / "split")
    assert not draft.exists()


def test_an_abandoned_draft_of_a_folder_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f".split.{os.getpid()}-{process_scope()}-01234567.part"
    left.mkdir()
    (left / "head.onnx").touch()
    os.utime(left / "head.onnx", (0, 0))
    os.utime(left, (0, 0))
    remove_abandoned_drafts(tmp_path / "split")
    assert not left.exists()


def test_a_draft_that_its_writer_is_done_with_meanwhile_is_none(tmp_path: Path) -> None:
    (tmp_path / f".model.1-{process_scope()}-01234567.part").symlink_to(tmp_path / "gone")
    assert not abandoned_drafts(tmp_path)
