"""Which file is which: by what whoever opens one again can tell whether it still is the one that it was."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from edge_run.base.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A file in one state. device, inode: which file. size_bytes, modified_ns: its length, and when it was written."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """Return that of the file with `status`."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class FileFacts(NamedTuple):
    """What tells a file that is not open from others, and from what it was before a change: a key of caches.

    place: its path, in hexadecimal. start: a hash of its first bytes; empty where they were not read.
    changed_ns: when its entry last changed, which nobody can set back after an edit.
    """

    place: str
    size_bytes: int
    inode: int
    start: str
    modified_ns: int
    changed_ns: int


def file_facts(path: Path, *, hashed_bytes: int = 0) -> FileFacts:
    """Return what tells the file at `path` from others; so many of its first bytes count. Raises OSError."""
    status, start = path.stat(), ""
    if hashed_bytes:
        import hashlib  # which takes long to load

        with path.open("rb") as file:
            start = hashlib.blake2b(file.read(hashed_bytes), digest_size=16).hexdigest()
    place = os.fsencode(path.resolve()).hex()
    return FileFacts(place, status.st_size, status.st_ino, start, status.st_mtime_ns, status.st_ctime_ns)


def changed(path: Path) -> ModelFileError:
    """Return the error for a file that was written to, or replaced, while it was in use."""
    return ModelFileError(f"{path}: the file changed while it was in use; start again")


def check_path(path: Path, identity: FileIdentity | None) -> None:
    """Raise ModelFileError unless `path` leads to the file of `identity`, where that is known."""
    try:
        is_same = identity is None or FileIdentity.of(path.stat()) == identity
    except OSError as error:
        raise changed(path) from error
    if not is_same:
        raise changed(path)
