"""The hash of a model: of all its bytes, read once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_run.base.errors import ModelFileMissing
from edge_run.runtime.fetch import fingerprint as module
from edge_run.runtime.fetch.fingerprint import fingerprint


def test_one_byte_makes_another_model(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(bytes(10_000))
    second.write_bytes(bytes(9_999) + b"1")
    assert fingerprint([first], tmp_path) != fingerprint([second], tmp_path)
    copy = tmp_path / "copy"
    copy.write_bytes(bytes(10_000))
    assert fingerprint([copy], tmp_path) == fingerprint([first], tmp_path)
    assert fingerprint([first, second], tmp_path) != fingerprint([second, first], tmp_path)


def test_a_file_is_read_once_and_again_when_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")
    known = fingerprint([path], tmp_path)
    monkeypatch.setattr(module, "_read", lambda path: pytest.fail("it was read again"))
    assert fingerprint([path], tmp_path) == known
    monkeypatch.undo()
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert fingerprint([path], tmp_path) != known


def test_what_is_kept_of_another_file_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")
    wanted = fingerprint([path], tmp_path)
    for kept in (tmp_path / "hashes").iterdir():
        kept.write_text("nonsense\n" + "0" * 64)
    assert fingerprint([path], tmp_path) == wanted


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelFileMissing, match=r"cannot be read \(No such file or directory\); check its permissions"):
        fingerprint([tmp_path / "none"], tmp_path)


def test_an_edit_whose_time_was_set_back_is_another_model(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")
    known, before = fingerprint([path], tmp_path), path.stat()
    path.chmod(0o600)
    assert fingerprint([path], tmp_path) == known, "it is read again, and is what it was"
    with path.open("r+b") as file:
        file.write(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fingerprint([path], tmp_path) != known
