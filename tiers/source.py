"""A model file as a source of bytes: read directly, past the page cache, into memory at a given address."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from edge_run.base.errors import ModelFileError, TierReadError, from_system, not_opened, reason_of
from edge_run.base.files.identity import FileIdentity, changed
from edge_run.tiers import _libc
from edge_run.tiers.drives.direct_io import open_direct
from edge_run.tiers.drives.page_cache import PageCache

PASSING = (errno.EIO, errno.ETIMEDOUT, errno.EAGAIN)  # as while a USB drive is reset: such a read is tried once more
PAUSE_S = 1.0  # before that


class Source(Protocol):
    """The bytes of one shard, from whichever file. Thread-safe.

    path: the shard's file.
    size_bytes: its length.
    """

    path: Path
    size_bytes: int

    @property
    def is_doubtful(self) -> bool:
        """Whether the file may have changed, so that chunks read again are to be compared with their first content."""
        ...

    def read_into(self, address: int, length: int, offset: int) -> int:
        """Fill memory at `address` from `offset`, both page-aligned; return the bytes read from storage."""
        ...


class PiecewiseSource(Source, Protocol):
    """A source that fills several pieces of memory in one read."""

    def read_pieces(self, pieces: Sequence[tuple[int, int]], offset: int) -> int:
        """Fill the `pieces` of memory, (address, length) each, one after the other, as `read_into` does."""
        ...


def read_patiently(read: Callable[[], int], is_void: Callable[[], bool] = lambda: False) -> int:
    """Return what `read` does; what fails as drives do for a moment is tried once more after a pause.

    is_void: whether nobody wants it any more. Raises what `read` raises.
    """
    try:
        return read()
    except TierReadError as error:
        if error.errno not in PASSING:
            raise
        time.sleep(PAUSE_S)
        if is_void():
            raise
    return read()


class SourceFile:
    """One shard, open for reading. Thread-safe: reads are positional.

    cached_bytes: what was read from the page cache (`use_page_cache`).

    is_direct: whether reads are direct (O_DIRECT). Where the file system has none, they are buffered, and the pages
        that each leaves in the page cache are dropped.
    is_doubtful: whether the file's status changed since it was opened while its size and time of modification did not:
        another mode or name, one more link, or an edit whose time was set back. Chunks read again are then compared
        with their first content.
    """

    def __init__(self, path: Path, expected: FileIdentity | None = None) -> None:
        """Open the file, which is `expected` where that is known. Raises ModelFileError."""
        self.path, self._fd = path, -1
        self.cached_bytes, self._keeps = 0, False
        self._cache: PageCache | None = None
        self._lock = threading.Lock()
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # opening a named pipe would wait for ever
                raise ModelFileError(f"{path}: not a regular file; give the path of the file itself")
            self._fd, self.is_direct = self._open(path)
            self._identity, self._changed_ns = self._identify()
        except OSError as error:
            self.close()
            why = f"{path}: cannot be opened ({reason_of(error)}); check its permissions"
            raise not_opened(error, why) from error
        if expected not in (None, self._identity):
            self.close()
            raise changed(path)
        self.size_bytes = self._identity.size_bytes
        self.is_doubtful = False

    @staticmethod
    def _open(path: Path) -> tuple[int, bool]:
        """Return a descriptor, and whether it reads directly, which is tried with a page; what fails, once more."""
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)

        def opened_directly() -> int | None:
            return open_direct(lambda direct: os.open(path, flags | direct), lambda fd, page: os.preadv(fd, page, 0))

        try:
            fd = opened_directly()
        except OSError as error:
            if error.errno in PASSING:
                time.sleep(PAUSE_S)
            fd = opened_directly()
        return (os.open(path, flags), False) if fd is None else (fd, True)

    def _identify(self) -> tuple[FileIdentity, int]:
        """Return which file is open, and when its status changed last."""
        status = os.fstat(self._fd)
        return FileIdentity.of(status), status.st_ctime_ns

    @property
    def identity(self) -> FileIdentity:
        """Which file is open."""
        return self._identity

    def use_page_cache(self, *, keeps: bool) -> None:
        """Read from the page cache what it holds, from now on.

        keeps: read all else through it too, and leave it there.
        """
        with contextlib.suppress(OSError):  # then all is read as before
            self._cache = PageCache(self._fd)
            self._keeps = keeps

    def is_cached(self, offset: int, length: int) -> bool:
        """Return whether `length` bytes at `offset` are to be read from the page cache."""
        return self._cache is not None and self._cache.holds(offset, length)

    def map_cached(self, address: int, length: int, offset: int) -> bool:
        """Map `length` bytes at `offset` at `address`, if next to all of them lie in the page cache.

        Return whether all can be read there then: the rest is brought, and where that fails, nothing is mapped.
        """
        if self._cache is None or not self._cache.holds(offset, length):
            return False
        try:
            self.map(address, length, offset)
            is_there = _libc.populate(address, length) or self._cache.holds(offset, length, least_share=1)
        except OSError:
            is_there = False
        if not is_there:
            _libc.map_anonymous(length, _libc.PROT_NONE, at=address)  # the kernel may have left a hole
        return is_there

    def map(self, address: int, length: int, offset: int) -> None:
        """Map `length` bytes at `offset` at `address`, wherever they lie; after `use_page_cache`. Raises OSError."""
        assert self._cache is not None
        _libc.map_file(self._cache.descriptor, length, offset, at=address)

    def check_unchanged(self) -> None:
        """Raise ModelFileError when the file was written to since it was opened; set `is_doubtful` when it may be."""
        found, changed_ns = self._identify()
        if found != self._identity:
            raise changed(self.path)
        self.is_doubtful |= changed_ns != self._changed_ns

    def read_into(self, address: int, length: int, offset: int) -> int:
        """Fill memory at `address` from `offset`, both page-aligned; return the bytes read.

        Less than `length` only at the end of the file. Raises TierReadError, ModelFileError when the file has shrunk,
        or BudgetError when the kernel has no memory for it.
        """
        return self.read_pieces([(address, length)], offset)

    def read_pieces(self, pieces: Sequence[tuple[int, int]], offset: int) -> int:
        """Fill the `pieces` of memory, (address, length) each, one after the other, as `read_into` does."""
        length, got = sum(length for _, length in pieces), 0
        expected = min(length, self.size_bytes - offset)
        is_cached = self.is_cached(offset, expected)
        descriptor, is_kept = self._choose(offset, expected, is_cached=is_cached)
        targets = [_libc.view(*piece) for piece in pieces]
        try:
            while got < expected:
                n = os.preadv(descriptor, targets, offset + got)
                if n <= 0:
                    raise ModelFileError(
                        f"{self.path}: ended at byte {offset + got} of {self.size_bytes}; it was cut while in use",
                        found_bytes=offset + got,
                        needed_bytes=self.size_bytes,
                    )
                got += n
                if got < expected:
                    targets = _after(targets, n)
        except OSError as error:
            what = f"{self.path}: reading {length} bytes at {offset}"
            if error.errno == errno.ENOMEM:
                raise from_system(error, what) from error
            raise TierReadError(
                f"{what} failed ({reason_of(error)}); check the drive",
                position_bytes=offset,
                needed_bytes=length,
                errno=error.errno,
            ) from error
        if is_cached:
            with self._lock:
                self.cached_bytes += got
        if not (self.is_direct or is_kept):
            _libc.forget_pages(self._fd, offset, length)
        return got

    def _choose(self, offset: int, length: int, *, is_cached: bool) -> tuple[int, bool]:
        """Return the descriptor for a read, and whether what it leaves in the page cache is to stay there."""
        if not self._cache or not (is_cached or self._keeps):
            return self._fd, False
        if not is_cached:
            self._cache.bring(offset, length)
        return self._cache.descriptor, True

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._cache:
            self._cache.close()
        descriptor, self._fd = self._fd, -1  # before it is closed: a read that hangs may go on after this
        if descriptor >= 0:
            os.close(descriptor)


def _after(targets: Sequence[memoryview], n_bytes: int) -> list[memoryview]:
    """Return what is left of `targets` after their first `n_bytes`."""
    left = []
    for target in targets:
        if n_bytes < len(target):
            left.append(target[n_bytes:])
        n_bytes = max(0, n_bytes - len(target))
    return left
