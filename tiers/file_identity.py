"""Which file a path led to, and in which state: whoever opens it again can tell whether it still is that one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

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
