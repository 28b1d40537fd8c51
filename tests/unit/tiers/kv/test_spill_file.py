"""The file without a name: what is written comes back, nothing is left of it, and refusals are told in one line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge_run.base.errors import TierReadError
from edge_run.tiers import _libc
from edge_run.tiers.kv.spill_file import SpillFile

PAGE = _libc.PAGE


@contextmanager
def pages(content: bytes) -> Iterator[int]:
    """Memory of whole pages that holds `content`."""
    address = _libc.map_anonymous(len(content))
    try:
        _libc.view(address, len(content))[:] = content
        yield address
    finally:
        _libc.unmap(address, len(content))


@pytest.fixture(params=["direct", "buffered", "named"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpillFile]:
    """A file on a system that has direct reads and files without names, or lacks the one, or both."""
    if request.param != "direct":
        monkeypatch.setattr(os, "O_DIRECT", 0)
    if request.param == "named":
        monkeypatch.setattr(os, "O_TMPFILE", 0)
    file = SpillFile(tmp_path / "new" / "folder")
    assert not file.is_direct or request.param == "direct"
    yield file
    file.close()


def test_what_is_written_comes_back_and_nothing_has_a_name(file: SpillFile) -> None:
    first, second = os.urandom(2 * PAGE), os.urandom(PAGE)
    with pages(first + second) as source, pages(bytes(3 * PAGE)) as target:
        file.write(source + 2 * PAGE, PAGE, 7 * PAGE)
        file.write(source, 2 * PAGE, 0)
        assert file.written_bytes == 3 * PAGE
        assert list(file.path.iterdir()) == []
        assert file.read_into(target, 2 * PAGE, 0) + file.read_into(target + 2 * PAGE, PAGE, 7 * PAGE) == 3 * PAGE
        assert bytes(_libc.view(target, 3 * PAGE)) == first + second
        assert file.read_bytes == 3 * PAGE
        assert os.fstat(file._fd).st_mode & 0o777 == 0o600
        file.empty()
        assert os.fstat(file._fd).st_blocks == 0
        with pytest.raises(TierReadError, match="cut short"):
            file.read_into(target, PAGE, 7 * PAGE)


def test_a_folder_that_takes_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TierReadError, match=r"keeping keys and values in .*file"):
        SpillFile(tmp_path / "file")


def test_a_full_drive_is_told_when_the_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a file system without direct reads, and then in the first pass."""
    before = set(os.listdir("/proc/self/fd"))

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(TierReadError, match="free some space"):
        SpillFile(tmp_path)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("code", "advice"), [(errno.ENOSPC, "free some space"), (errno.EIO, "check the drive")], ids=["full", "broken"]
)
def test_what_the_drive_refuses(code: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpillFile(tmp_path)

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", refuse)
    monkeypatch.setattr(os, "preadv", refuse)
    with pages(bytes(PAGE)) as address:
        for call, what in (file.write, "keeping keys and values in"), (file.read_into, "reading keys and values back"):
            with pytest.raises(TierReadError, match=f"{what}.*{tmp_path}.*{advice}") as refusal:
                call(address, PAGE, 0)
            assert refusal.value.errno == code
    assert file.written_bytes == file.read_bytes == 0
    file.close()
