"""Files of ours: written as a whole or not at all, and what is said where they cannot be."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edge_run.base import files
from edge_run.base.errors import ConfigError, EdgeRunError, ModelFileError, TierReadError
from edge_run.base.files import (
    file_to_write,
    folder_to_write,
    keep_file,
    read_text_file,
    remove_abandoned_drafts,
    remove_drafts,
    reserved,
    whole_file,
    whole_folder,
    writing,
)
from edge_run.devices.members.identity import write_private


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    what = r"^--out x: cannot be written \(No such file.*\); choose another folder$"
    with pytest.raises(TierReadError, match=what) as found, writing("--out x", "choose another folder"):
        (tmp_path / "nowhere" / "x").write_text("")
    assert found.value.errno == errno.ENOENT


def test_text_in_another_encoding_is_told_where_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes("a café".encode("latin-1"))
    what = r"^--file prompt: not UTF-8 text \(.* at byte 5\); save it as UTF-8, as iconv -t UTF-8 does$"
    with pytest.raises(ConfigError, match=what):
        read_text_file(tmp_path / "prompt", "--file prompt", 100)


@pytest.mark.parametrize("error", [ModelFileError("model: is gone"), TierReadError("model: read failed", errno=5)])
def test_what_fails_while_a_file_is_written_keeps_its_own_words(error: EdgeRunError) -> None:
    with pytest.raises(type(error)) as found, writing("out"):
        raise error
    assert found.value is error


def test_a_file_is_written_where_links_lead_and_in_place_of_nothing_else(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(file)
    os.mkfifo(pipe)
    assert file_to_write(link, "--out", is_replacing=False) == file_to_write(file, "--out") == file
    file.touch()
    assert file_to_write(link, "--out") == file
    with pytest.raises(ConfigError, match=r"^--out: exists; choose another name, or replace it with --force$"):
        file_to_write(link, "--out", is_replacing=False)
    for other in (pipe, tmp_path):
        with pytest.raises(ConfigError, match=r"^--out: is there, and is no file; choose another name$"):
            file_to_write(other, "--out")


def test_a_cache_file_is_kept_for_its_owner_in_place_of_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    for content in (b"old", b"new"):
        keep_file(path, content, "it")
        assert path.read_bytes() == content
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path], "no draft is left"


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level("INFO"):
        keep_file(tmp_path / "file" / "below", b"", "what was measured")
    assert f"what was measured cannot be kept in {tmp_path / 'file'}" in caplog.text


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
    here, elsewhere = files.process_scope(), "0123abcd"
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


def test_a_folder_is_there_with_all_its_files_or_not_at_all(tmp_path: Path) -> None:
    new, empty = tmp_path / "new", tmp_path / "empty"
    empty.mkdir()
    for folder in (new, empty):
        with whole_folder(folder) as draft:
            (draft / "one").write_text("1")
            assert not folder.exists() or not list(folder.iterdir())
        assert [path.name for path in folder.iterdir()] == ["one"]
    with pytest.raises(FileNotFoundError), whole_folder(tmp_path / "failed") as draft:
        (draft / "nowhere" / "one").write_text("1")
    with whole_folder(tmp_path / "ended") as draft:
        (draft / "one").write_text("1")
        remove_drafts()  # as SIGTERM does
        assert not draft.exists()
        draft.mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "ended", "new"]


def test_an_abandoned_draft_of_a_folder_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f".split.{os.getpid()}-{files.process_scope()}-01234567.part"
    left.mkdir()
    (left / "head.onnx").touch()
    os.utime(left / "head.onnx", (0, 0))
    os.utime(left, (0, 0))
    remove_abandoned_drafts(tmp_path / "split")
    assert not left.exists()


def test_a_folder_takes_the_place_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, file, link = tmp_path / "full", tmp_path / "file", tmp_path / "link"
    full.mkdir()
    (full / "model.onnx").write_text("mine")
    file.touch()
    link.symlink_to(tmp_path / "new")
    assert folder_to_write(link, "--out") == tmp_path / "new"
    with pytest.raises(ConfigError, match=r"^--out: holds model\.onnx; choose a new or an empty folder$"):
        folder_to_write(full, "--out")
    with pytest.raises(ConfigError, match=r"^--out: is there, and is no folder; choose another name$"):
        folder_to_write(file, "--out")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match=r"^--out: is the current folder or a drive; name a new folder in it$"):
        folder_to_write(Path(), "--out")


def test_what_is_written_durably_is_on_the_drive_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    monkeypatch.setattr(files, "sync", lambda path: synced.append((path.name, (tmp_path / "file").exists())))
    with whole_file(tmp_path / "file") as draft:
        draft.write_text("a cache")
    assert not synced
    (tmp_path / "file").unlink()
    with whole_file(tmp_path / "file", is_durable=True) as draft:
        draft.write_text("a secret")
    assert synced == [(draft.name, False), (tmp_path.name, True)]


def test_a_secret_is_on_the_drive_before_it_takes_the_place_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (done.append("sync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("name"), replace(*names)))
    write_private(tmp_path / "cluster", b"secret")
    assert done == ["sync", "name", "sync"]


def test_room_is_kept_until_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved(tmp_path / "split", 1 << 20):
        (draft,) = tmp_path.iterdir()
        assert draft.stat().st_size == 1 << 20
    assert not list(tmp_path.iterdir())

    def refuse(*_: int) -> None:
        raise OSError(refused, os.strerror(refused))

    monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    refused = errno.EOPNOTSUPP
    with reserved(tmp_path / "split", 1 << 20):
        pass
    refused = errno.ENOSPC
    with pytest.raises(OSError, match="No space left"), reserved(tmp_path / "split", 1 << 20):
        pass
    assert not list(tmp_path.iterdir())


def test_a_draft_that_its_writer_is_done_with_meanwhile_is_none(tmp_path: Path) -> None:
    (tmp_path / f".model.1-{files.process_scope()}-01234567.part").symlink_to(tmp_path / "gone")
    assert not files.abandoned_drafts(tmp_path)
