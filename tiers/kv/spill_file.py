"""The file that rows go to when memory is short: it has no name, so that nothing is left of it, however a run ends."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from edge_run.base.errors import TierReadError, system_errors
from edge_run.tiers import _libc
from edge_run.tiers.drives.direct_io import open_direct

WRITING, READING = "keeping keys and values in", "reading keys and values back from"


class SpillFile:
    """A file without a name in `folder`, for this process alone. Thread-safe. Reads and writes are whole pages.

    is_direct: whether they pass the page cache by (O_DIRECT). Where the file system has no direct ones, what they leave
        in the page cache is dropped.
    written_bytes, read_bytes: all so far.
    """

    is_doubtful = False  # nobody else can write to it

    def __init__(self, folder: Path) -> None:
        """Make the file. Raises TierReadError."""
        self.path, self.size_bytes = folder, 1 << 62  # a source of as many bytes as are asked for
        self.written_bytes = self.read_bytes = 0
        self._lock = threading.Lock()
        with system_errors(f"{WRITING} {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            self._fd, self.is_direct = _open(folder)

    def write(self, address: int, length: int, offset: int) -> None:
        """Write memory to `offset`. Raises TierReadError; what the file has there is not known then."""
        self._transfer(os.pwritev, address, length, offset, WRITING)
        if not self.is_direct:
            with system_errors(f"{WRITING} {self.path}"):
                getattr(os, "fdatasync", os.fsync)(self._fd)  # only what is on the drive leaves the page cache
            _libc.forget_pages(self._fd, offset, length)
        with self._lock:
            self.written_bytes += length

    def read_into(self, address: int, length: int, offset: int) -> int:
        """Fill memory from `offset`; return the bytes read. Raises TierReadError."""
        self._transfer(os.preadv, address, length, offset, READING)
        if not self.is_direct:
            _libc.forget_pages(self._fd, offset, length)
        with self._lock:
            self.read_bytes += length
        return length

    def free(self, offset: int, length: int) -> None:
        """Give the drive back what is in a range of the file, where its file system can."""
        with contextlib.suppress(OSError):  # it is only kept longer
            _libc.punch_hole(self._fd, offset, length)

    def empty(self) -> None:
        """Give the drive back all that is in the file."""
        with contextlib.suppress(OSError):  # it is only kept longer
            os.ftruncate(self._fd, 0)

    def close(self) -> None:
        """Close the file, which is gone then. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _transfer(
        self, call: Callable[[int, list[memoryview], int], int], address: int, length: int, offset: int, what: str
    ) -> None:
        rest = _libc.view(address, length)
        with system_errors(f"{what} {self.path}"):
            while rest:
                n_bytes = call(self._fd, [rest], offset)
                if not n_bytes:
                    raise TierReadError(f"{what} {self.path}: the file has been cut short", position_bytes=offset)
                rest, offset = rest[n_bytes:], offset + n_bytes


def _open(folder: Path) -> tuple[int, bool]:
    """Return the descriptor of a file without a name, and whether it reads and writes directly. Raises OSError."""
    fd = open_direct(partial(_unnamed, folder), lambda fd, page: os.pwritev(fd, page, 0))
    return (_unnamed(folder, 0), False) if fd is None else (fd, True)


def _unnamed(folder: Path, flags: int) -> int:
    """Return the descriptor of a new file that has no name, or had one for a moment where there are none without."""
    flags |= os.O_RDWR | getattr(os, "O_CLOEXEC", 0)
    if unnamed := getattr(os, "O_TMPFILE", 0):
        with contextlib.suppress(OSError):
            return os.open(folder, flags | unnamed | os.O_EXCL, 0o600)
    named, name = tempfile.mkstemp(prefix=".keys-and-values-", dir=folder)
    try:
        return os.open(name, flags)
    finally:
        os.close(named)
        os.unlink(name)
