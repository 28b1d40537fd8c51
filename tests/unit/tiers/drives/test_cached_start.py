"""A start on the page cache's own pages: what is mapped, what is copied, what a change or a failure does."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_run.base.config import CHUNK_BYTES
from edge_run.base.errors import EdgeRunError, ModelFileError, TierReadError
from edge_run.base.units import MIB
from edge_run.tiers import _libc
from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.drives import cached_start
from edge_run.tiers.drives.cached_start import CachedStart
from edge_run.tiers.source import SourceFile
from mapped import PAGE, content, is_readable, mapped, write_random

SIZE = 20 * CHUNK_BYTES + 5 * PAGE + 123


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    write_random(file, SIZE)
    file.read_bytes()
    return file


@pytest.fixture
def source(path: Path) -> Iterator[SourceFile]:
    one = SourceFile(path)
    one.use_page_cache(keeps=True)
    if not one.is_cached(0, SIZE):
        one.close()
        pytest.skip("no file stays in the page cache here, or the kernel does not say so")
    yield one
    one.close()


@pytest.fixture
def space() -> Iterator[AddressSpace]:
    with mapped([SIZE], CHUNK_BYTES) as space:
        yield space


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies wait until this is set."""
    event, read_into = threading.Event(), SourceFile.read_into

    def wait(self: SourceFile, address: int, length: int, offset: int) -> int:
        event.wait(60)
        return read_into(self, address, length, offset)

    monkeypatch.setattr(SourceFile, "read_into", wait)
    return event


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_start, "PATIENCE_S", 0.0)


@contextlib.contextmanager
def started(space: AddressSpace, source: SourceFile) -> Iterator[CachedStart]:
    start = CachedStart(space, [source], range(space.n_chunks))
    try:
        yield start
    finally:
        start.close()
        start.close()


def bytes_in(space: AddressSpace, chunks: frozenset[int]) -> bytes:
    places = [space.place(chunk) for chunk in sorted(chunks)]
    return b"".join(content(place.address, place.length) for place in places)


def is_of_a_file(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(text, 16) for text in line.split()[0].split("-"))
        if start <= address < stop:
            return line.endswith("model.gguf")
    return False


def test_all_is_there_at_once_and_a_moment_later_in_memory_of_its_own(
    path: Path, source: SourceFile, space: AddressSpace, held: threading.Event
) -> None:
    data = path.read_bytes()[: 20 * CHUNK_BYTES]
    with started(space, source) as start:
        assert start.mapped == frozenset(range(20)), "whole chunks"
        assert all(is_of_a_file(space.place(chunk).address) for chunk in start.mapped)
        assert bytes_in(space, start.mapped) == data
        held.set()
        start._thread.join()
        assert not any(is_of_a_file(space.place(chunk).address) for chunk in start.mapped)
        assert bytes_in(space, start.mapped) == data
        assert start.copied_bytes == len(data)
        start.check()


def test_who_reads_meanwhile_finds_the_same_bytes(
    path: Path, source: SourceFile, space: AddressSpace, held: threading.Event
) -> None:
    data = path.read_bytes()[: 20 * CHUNK_BYTES]
    with started(space, source) as start:
        assert start._thread.is_alive()
        while start._thread.is_alive():
            assert bytes_in(space, start.mapped) == data
            held.set()  # after a look at what is not copied yet
        assert bytes_in(space, start.mapped) == data
        assert start.copied_bytes == len(data)


def test_what_is_not_in_the_page_cache_is_left_to_others(
    path: Path, source: SourceFile, space: AddressSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert source._cache is not None
    holds = source._cache.holds
    monkeypatch.setattr(source._cache, "holds", lambda at, length, **_: at == 0 and holds(at, length))
    with started(space, source) as start:
        assert start.mapped == frozenset(range(4))
    assert not is_readable(space.place(4).address)


def test_a_page_that_the_kernel_took_away_is_brought_back(
    path: Path, source: SourceFile, space: AddressSpace, held: threading.Event
) -> None:
    descriptor = os.open(path, os.O_RDWR)
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 3 * MIB, PAGE, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    assert source._cache is not None
    if source._cache.holds(0, 8 * MIB, least_share=1):
        pytest.skip("this file system does not let a page go")
    with started(space, source) as start:
        assert source._cache.holds(0, 8 * MIB, least_share=1)
        assert start.mapped == frozenset(range(20))
        assert bytes_in(space, start.mapped) == path.read_bytes()[: 20 * CHUNK_BYTES]
        held.set()


def test_one_that_cannot_be_read_is_left_to_a_reader_who_can_say_so(
    source: SourceFile, space: AddressSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts what it tried to read in vain as there."""

    def fail(*_: int) -> bool:
        raise OSError(errno.EFAULT, "a signal otherwise")

    monkeypatch.setattr(_libc, "populate", fail)
    with started(space, source) as start:
        assert not start.mapped
    assert not is_readable(space.place(4).address)


@pytest.mark.parametrize("is_all_there", [True, False])
def test_a_kernel_that_cannot_be_told_to_read_is_asked_whether_all_is_there(
    source: SourceFile, space: AddressSpace, monkeypatch: pytest.MonkeyPatch, is_all_there: bool
) -> None:
    assert source._cache is not None
    monkeypatch.setattr(source._cache, "holds", lambda *_, least_share=0.9: least_share < 1 or is_all_there)
    monkeypatch.setattr(_libc, "populate", lambda *_: False)
    with started(space, source) as start:
        assert start.mapped == frozenset(range(20) if is_all_there else ())
    assert is_readable(space.place(4).address) == is_all_there


def test_what_cannot_be_brought_to_memory_is_an_error_and_no_signal(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(PAGE))
    descriptor = os.open(path, os.O_RDONLY)
    address = _libc.map_file(descriptor, 2 * PAGE)
    try:
        if not _libc.populate(address, PAGE):
            pytest.skip("this kernel cannot be told to")
        with pytest.raises(OSError, match="madvise"):
            _libc.populate(address, 2 * PAGE)
    finally:
        _libc.unmap(address, 2 * PAGE)
        os.close(descriptor)


def test_nothing_is_mapped_without_a_page_cache(path: Path, space: AddressSpace) -> None:
    source = SourceFile(path)
    with started(space, source) as start:
        assert not start.mapped
        start.check()
    source.close()


def test_a_file_that_changes_before_it_is_copied_is_told_before_the_next_pass(
    path: Path, source: SourceFile, space: AddressSpace, held: threading.Event
) -> None:
    with started(space, source) as start:
        start.check()
        with path.open("r+b") as file:
            file.seek(3 * MIB)
            file.write(b"other")
        os.utime(path, ns=(1, 1))
        held.set()
        with pytest.raises(ModelFileError, match="changed"):
            start.check()
        start._thread.join()
        with pytest.raises(ModelFileError, match="changed"):
            start.check()


def test_a_file_that_changes_in_a_pass_is_told_before_what_it_computed_is(
    path: Path, source: SourceFile, space: AddressSpace, held: threading.Event
) -> None:
    with started(space, source) as start:
        start.check()
        start.check_read()
        with path.open("r+b") as file:
            file.write(b"other")
        os.utime(path, ns=(1, 1))
        held.set()
        start._thread.join()  # within the pass
        with pytest.raises(ModelFileError, match="changed"):
            start.check_read()


def test_once_all_is_copied_the_file_may_change(path: Path, source: SourceFile, space: AddressSpace) -> None:
    with started(space, source) as start:
        start._thread.join()
        start.check()
        path.write_bytes(b"other")
        start.check()
        start.check_read()
        assert len(bytes_in(space, start.mapped)) == 20 * CHUNK_BYTES


def test_a_failing_copy_is_told_and_what_was_mapped_stays(
    path: Path, source: SourceFile, space: AddressSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(12, "no memory")

    data = path.read_bytes()[: 20 * CHUNK_BYTES]
    monkeypatch.setattr(_libc, "move_pages", refuse)
    with started(space, source) as start:
        start._thread.join()
        with pytest.raises(EdgeRunError, match="no memory"):
            start.check()
        assert bytes_in(space, start.mapped) == data
    monkeypatch.setattr(source, "read_into", lambda *_: (_ for _ in ()).throw(TierReadError("bad sector")))
    with started(space, source) as start:
        start._thread.join()
        with pytest.raises(TierReadError, match="bad sector"):
            start.check()
        start._thread.join()
        monkeypatch.undo()
        with pytest.raises(TierReadError, match="bad sector"):
            start.check()  # it was tried again, and is once more
        start._thread.join()
        start.check()
        assert start.copied_bytes == len(data)
        assert bytes_in(space, start.mapped) == data


def test_a_drive_may_have_a_bad_moment(
    path: Path, source: SourceFile, space: AddressSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_run.tiers.source.PAUSE_S", 0.01)
    failures, good = [errno.EIO], source.read_into

    def fail_once(address: int, length: int, offset: int) -> int:
        if failures:
            raise TierReadError("the drive is reset", errno=failures.pop())
        return good(address, length, offset)

    monkeypatch.setattr(source, "read_into", fail_once)
    with started(space, source) as start:
        start._thread.join()
        start.check()
        assert not failures
        assert start.copied_bytes == 20 * CHUNK_BYTES
        assert bytes_in(space, start.mapped) == path.read_bytes()[: 20 * CHUNK_BYTES]


def test_a_thread_that_cannot_start_is_told_and_tried_again(
    path: Path, source: SourceFile, space: AddressSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not copied does not count as copied, and closing waits for nobody."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(source, "read_into", lambda *_: (_ for _ in ()).throw(TierReadError("bad sector")))
    with started(space, source) as start:
        start._thread.join()
        monkeypatch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(TierReadError, match="can't start new thread"):
                start.check()
        assert start._thread.has_ended.is_set(), "closing waits for this"
        monkeypatch.undo()
        with pytest.raises(TierReadError, match="bad sector"):
            start.check()
        start._thread.join()
        start.check()
        assert start.copied_bytes == 20 * CHUNK_BYTES


def test_the_first_pass_is_not_disturbed(
    source: SourceFile, space: AddressSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_start, "PATIENCE_S", 60.0)
    with started(space, source) as start:
        start.check()
        start._thread.join(0.2)
        assert start.copied_bytes == 0
        start.check()
        start._thread.join()
        assert start.copied_bytes == 20 * CHUNK_BYTES


def test_closing_stops_it(source: SourceFile, space: AddressSpace, held: threading.Event) -> None:
    with started(space, source) as start:
        start._is_closed = True
        held.set()
    assert start.copied_bytes <= 4 * CHUNK_BYTES
    assert not start._thread.is_alive()
