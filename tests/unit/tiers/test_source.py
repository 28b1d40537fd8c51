"""A model file as a source: direct where the file system can, buffered elsewhere, and errors that say what happened."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_run.base.errors import BudgetError, ModelFileError, ModelFileMissing, TierReadError
from edge_run.tiers import _libc
from edge_run.tiers import source as sources
from edge_run.tiers.source import SourceFile
from mapped import PAGE, content, write_random

SIZE = 10 * PAGE + 123


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    write_random(file, SIZE)
    return file


@pytest.fixture
def memory() -> Iterator[int]:
    """The address of twelve pages, all ones."""
    address = _libc.map_anonymous(12 * PAGE)
    _libc.view(address, 12 * PAGE)[:] = b"\xff" * (12 * PAGE)
    yield address
    _libc.unmap(address, 12 * PAGE)


@pytest.fixture
def in_memory_folder() -> Iterator[Path]:
    """A folder on a file system without direct reads."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no writable /dev/shm: nothing here is without direct reads")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def refuse_direct(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """A file system that refuses O_DIRECT when the file is opened (tmpfs before Linux 6.6), or when it is read."""
    real_open, real_read = os.open, os.preadv
    direct_files: set[int] = set()

    def open_file(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT and at == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real_open(path, flags)
        (direct_files.add if flags & os.O_DIRECT else direct_files.discard)(fd)
        return fd

    def read_file(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fd in direct_files:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(fd, buffers, offset)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "preadv", read_file)


@pytest.mark.parametrize("refused_at", [None, "open", "read"])
@pytest.mark.parametrize(
    ("offset", "length", "n_expected"),
    [(0, 4 * PAGE, 4 * PAGE), (5 * PAGE, PAGE, PAGE), (8 * PAGE, 4 * PAGE, 2 * PAGE + 123), (10 * PAGE, PAGE, 123)],
)
def test_memory_holds_what_the_file_holds(
    path: Path, memory: int, offset: int, length: int, n_expected: int, refused_at: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """To the last odd byte, where a direct read of a whole page comes back short."""
    if refused_at:
        refuse_direct(monkeypatch, refused_at)
    source = SourceFile(path)
    assert source.is_direct is (refused_at is None)
    assert source.read_into(memory, length, offset) == n_expected
    assert content(memory, n_expected) == path.read_bytes()[offset : offset + n_expected]
    assert content(memory + length, PAGE) == b"\xff" * PAGE, "nothing is written behind the range"
    source.close()


def test_in_memory_file_systems_work_either_way(in_memory_folder: Path, memory: int) -> None:
    path = in_memory_folder / "model.gguf"
    data = write_random(path, SIZE)
    source = SourceFile(path)
    assert source.read_into(memory, 12 * PAGE, 0) == SIZE
    assert content(memory, SIZE) == data
    source.close()


def test_reading_leaves_nothing_in_the_page_cache(path: Path, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a buffered read leaves there would count against the budget of the machine."""
    refuse_direct(monkeypatch, "open")
    dropped = []
    real = os.posix_fadvise

    def note(fd: int, offset: int, length: int, advice: int) -> None:
        dropped.append((offset, length, advice))
        real(fd, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", note)
    source = SourceFile(path)
    source.read_into(memory, 2 * PAGE, PAGE)
    assert dropped == [(PAGE, 2 * PAGE, os.POSIX_FADV_DONTNEED)]
    source.close()


def test_short_reads_are_continued(path: Path, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may return fewer bytes than asked for, at a signal for instance."""
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:PAGE]], offset))
    source = SourceFile(path)
    assert source.read_into(memory, 6 * PAGE, 0) == 6 * PAGE
    assert content(memory, 6 * PAGE) == path.read_bytes()[: 6 * PAGE]
    source.close()


def test_one_read_fills_several_pieces_of_memory(path: Path, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system brings less than was asked for: all of a piece, and parts of pieces."""
    real, asked = os.preadv, list[int]()

    def stingy(fd: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(len(buffers))
        return real(fd, [buffers[0][: 2 * PAGE], *buffers[1:2]][: 1 + len(asked) % 2], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    pieces = [(memory + 5 * PAGE, 3 * PAGE), (memory, PAGE), (memory + 8 * PAGE, 2 * PAGE)]
    source = SourceFile(path)
    assert source.read_pieces(pieces, 4 * PAGE) == 6 * PAGE
    source.close()
    found = b"".join(bytes(_libc.view(address, length)) for address, length in pieces)
    assert found == path.read_bytes()[4 * PAGE : 10 * PAGE]
    assert max(asked) == 3
    assert len(asked) > 2


def test_a_file_that_shrank_is_named_with_both_sizes(path: Path, memory: int) -> None:
    source = SourceFile(path)
    os.truncate(path, 4 * PAGE)
    assert source.read_into(memory, 2 * PAGE, 0) == 2 * PAGE
    with pytest.raises(ModelFileError, match="cut while in use") as caught:
        source.read_into(memory, 4 * PAGE, 2 * PAGE)
    assert (caught.value.found_bytes, caught.value.needed_bytes) == (4 * PAGE, SIZE)
    source.close()


@pytest.mark.parametrize("change", [lambda p: os.truncate(p, SIZE - 1), lambda p: os.utime(p, ns=(1, 1))])
def test_a_file_that_was_written_to_is_noticed(path: Path, change: object) -> None:
    assert callable(change)
    source = SourceFile(path)
    source.check_unchanged()
    change(path)
    with pytest.raises(ModelFileError, match="changed while it was in use"):
        source.check_unchanged()
    source.close()


def test_a_file_that_was_replaced_is_still_the_old_one(path: Path, memory: int) -> None:
    """A download that is renamed over the model does no harm: the open file is the one that was planned for."""
    data = path.read_bytes()
    source = SourceFile(path)
    other = path.with_name("other")
    write_random(other, SIZE, seed=1)
    other.rename(path)
    source.check_unchanged()
    source.read_into(memory, 12 * PAGE, 0)
    assert content(memory, SIZE) == data
    source.close()


def test_what_the_drive_refuses_is_a_read_error(path: Path, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SourceFile(path)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(TierReadError, match="Input/output error") as caught:
        source.read_into(memory, PAGE, 2 * PAGE)
    assert (caught.value.position_bytes, caught.value.needed_bytes) == (2 * PAGE, PAGE)
    assert caught.value.errno == errno.EIO
    assert isinstance(caught.value.__cause__, OSError)
    source.close()


def test_a_read_that_the_kernel_has_no_memory_for_is_not_the_drives_fault(
    path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SourceFile(path)

    def fail(*_: object) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(BudgetError, match=r"model\.gguf: .*out of memory.*smaller memory="):
        source.read_into(memory, PAGE, 2 * PAGE)
    source.close()


def test_memory_that_is_not_there_is_an_error_and_no_crash(path: Path) -> None:
    address = _libc.map_anonymous(PAGE, _libc.PROT_NONE)
    source = SourceFile(path)
    with pytest.raises(TierReadError, match="Bad address"):
        source.read_into(address, PAGE, 0)
    _libc.unmap(address, PAGE)
    source.close()


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ModelFileMissing, match=r"none\.gguf: cannot be opened"):
        SourceFile(tmp_path / "none.gguf")


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        SourceFile(tmp_path / "model.gguf")


def test_closing_gives_the_file_back(path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    source = SourceFile(path)
    source.close()
    source.close()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOMEM])
def test_a_drive_that_fails_once_as_it_wakes_up_is_read_directly(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(SourceFile(path)) as source:
        if not source.is_direct:
            pytest.skip("no direct reads here")
    real, n_reads = os.preadv, 0

    def fail_once(descriptor: int, targets: list[memoryview], offset: int) -> int:
        nonlocal n_reads
        n_reads += 1
        if n_reads == 1:
            raise OSError(number, os.strerror(number))
        return real(descriptor, targets, offset)

    monkeypatch.setattr(os, "preadv", fail_once)
    monkeypatch.setattr(sources, "PAUSE_S", 0.01)
    with contextlib.closing(SourceFile(path)) as source:
        assert source.is_direct


def test_a_drive_that_goes_on_failing_does_not_count_as_one_without_direct_reads(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(sources, "PAUSE_S", 0.01)
    with pytest.raises(ModelFileError, match=os.strerror(errno.EIO)):
        SourceFile(path)
