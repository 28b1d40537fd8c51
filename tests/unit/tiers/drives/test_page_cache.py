"""What the page cache holds, asked in both ways, and reads through it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_run.base.units import MIB
from edge_run.tiers import _libc
from edge_run.tiers.drives.page_cache import PageCache
from edge_run.tiers.source import SourceFile
from mapped import PAGE, content, write_random

SIZE = 4 * MIB + 5 * PAGE + 123


def refuse(*_: object) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.fixture(params=["cachestat", "mincore"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the kernel is asked; the test is skipped where it does not answer so."""
    if request.param == "mincore":
        monkeypatch.setattr(_libc, "cached_bytes", refuse)
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    write_random(file, SIZE)
    descriptor = os.open(file, os.O_RDWR)
    os.fdatasync(descriptor)  # what is not written yet does not go
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    return file


@pytest.fixture
def source(path: Path, way: str) -> Iterator[SourceFile]:
    one = SourceFile(path)
    one.use_page_cache(keeps=False)
    assert one._cache is not None
    if one._cache.way != way or one.is_cached(0, PAGE):
        one.close()
        pytest.skip(f"no {way} here, or no file that is not in memory")
    yield one
    one.close()


@pytest.fixture
def memory() -> Iterator[int]:
    address = _libc.map_anonymous(8 * MIB)
    yield address
    _libc.unmap(address, 8 * MIB)


def test_only_what_is_there_is_read_from_there(source: SourceFile, path: Path, memory: int) -> None:
    data = path.read_bytes()
    os.posix_fadvise(source._fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(source._fd, 0, 0, os.POSIX_FADV_RANDOM)
    assert source._cache is not None
    os.posix_fadvise(source._cache.descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # so that no more is read than asked for
    os.pread(source._cache.descriptor, 2 * PAGE, MIB)
    assert source.is_cached(MIB, 2 * PAGE)
    assert not source.is_cached(2 * MIB, MIB)
    assert source.read_into(memory, MIB, 2 * MIB) == MIB
    assert source.cached_bytes == 0
    assert source.read_into(memory + 2 * MIB, 2 * PAGE, MIB) == 2 * PAGE
    assert source.cached_bytes == 2 * PAGE
    assert content(memory, MIB) == data[2 * MIB : 3 * MIB]
    assert content(memory + 2 * MIB, 2 * PAGE) == data[MIB : MIB + 2 * PAGE]
    assert not source.is_cached(2 * MIB, MIB), "a direct read leaves nothing there"


def test_what_is_kept_is_there_for_the_next_one(source: SourceFile, path: Path, memory: int) -> None:
    source.use_page_cache(keeps=True)
    assert source.read_into(memory, 5 * MIB, 0) == SIZE
    assert source.cached_bytes == 0
    following = SourceFile(path)
    following.use_page_cache(keeps=False)
    assert following.read_into(memory, 5 * MIB, 0) == SIZE
    assert following.cached_bytes == SIZE
    assert content(memory, SIZE) == path.read_bytes()
    following.close()


def test_of_a_file_of_somebody_else_mincore_says_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_libc, "cached_bytes", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: 1 + path.stat().st_uid)
    monkeypatch.setattr(os, "access", lambda *_: False)
    path.read_bytes()
    with path.open("rb") as file:
        cache = PageCache(file.fileno())
        assert cache.way == ""
        assert not cache.holds(0, PAGE)
        cache.close()


def test_everything_is_given_back(path: Path, way: str) -> None:
    before, maps = set(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count(str(path))
    source = SourceFile(path)
    source.use_page_cache(keeps=True)
    source.close()
    source.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert Path("/proc/self/maps").read_text().count(str(path)) == maps
