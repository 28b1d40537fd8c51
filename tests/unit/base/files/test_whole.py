"""Files of ours: written as a whole or not at all, and what is said where they cannot be."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from edge_run.base.errors import ConfigError, EdgeRunError, ModelFileError, TierReadError
from edge_run.base.files import whole
from edge_run.base.files.drafts import remove_drafts
from edge_run.base.files.whole import (
    file_to_write,
    fill_file,
    folder_to_write,
    keep_file,
    reserve_file,
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
    wanted = "^--out: exists; choose another name, or replace it with is_overwritten=True$"
    with pytest.raises(ConfigError, match=wanted):
        file_to_write(link, "--out", is_replacing=False)
    for other in (pipe, tmp_path):
        with pytest.raises(ConfigError, match=r"^--out: is there, and is no file; choose another name$"):
            file_to_write(other, "--out")


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_appears_while_another_is_written_stays(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory cards often have a file system whose files have one name each."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    file, link = tmp_path / "file", tmp_path / "link"
    with whole_file(file, 0o600, is_durable=True, is_replacing=False) as draft:
        draft.write_text("first")
    assert (file.read_text(), file.stat().st_mode & 0o777, file.stat().st_nlink) == ("first", 0o600, 1)

    def write_beside_another_one(place: Path) -> None:
        with whole_file(place, is_replacing=False) as draft:
            draft.write_text("second")
            if place is link:
                link.symlink_to(tmp_path / "nowhere")

    for place in (file, link):
        with pytest.raises(ConfigError, match=f"{place}: exists; choose another name, or replace it with is_"):
            write_beside_another_one(place)
    assert sorted(tmp_path.iterdir()) == [file, link], "no draft is left"
    assert file.read_text() == "first"


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
    monkeypatch.setattr(whole, "sync", lambda path: synced.append((path.name, (tmp_path / "file").exists())))
    with whole_file(tmp_path / "file") as draft:
        draft.write_text("a cache")
    assert not synced
    (tmp_path / "file").unlink()
    with whole_file(tmp_path / "file", is_durable=True) as draft:
        draft.write_text("a secret")
    assert synced == [(draft.name, False), (tmp_path.name, True)]


def test_a_folder_may_be_there_to_be_written_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read any, so it is the system that refuses here."""
    opened = os.open

    def refuse_folders(path: Path, *how: int) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *how)

    monkeypatch.setattr(os, "open", refuse_folders)
    with whole_file(tmp_path / "file", is_durable=True, is_replacing=False) as draft:
        draft.write_text("made")
    with whole_folder(tmp_path / "folder") as folder:
        (folder / "one").write_text("made")
    assert ((tmp_path / "file").read_text(), (tmp_path / "folder/one").read_text()) == ("made", "made")
    with pytest.raises(FileNotFoundError):
        whole.sync(tmp_path / "nowhere")


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
    reserve_file(tmp_path / "one", 1 << 20, 0o600)
    before = (tmp_path / "one").stat()
    assert (before.st_size, before.st_mode & 0o777) == (1 << 20, 0o600)
    with pytest.raises(TypeError):
        fill_file(tmp_path / "one", "no bytes")  # type: ignore[arg-type]
    assert (tmp_path / "one").stat().st_size == 1 << 20, "its room is not given back before it is written"
    fill_file(tmp_path / "one", b"content")
    assert (tmp_path / "one").read_bytes() == b"content"

    def refuse(*_: int) -> None:
        raise OSError(refused, os.strerror(refused))

    monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    refused = errno.EOPNOTSUPP
    reserve_file(tmp_path / "two", 1 << 20)
    fill_file(tmp_path / "two", b"content")
    assert (tmp_path / "two").read_bytes() == b"content"
    refused = errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        reserve_file(tmp_path / "three", 1 << 20)
