"""The files of a tool: the model that is read, and what is written, which is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from edge_run.base.errors import ConfigError, EdgeRunError, ModelFileError, TierReadError
from edge_run.base.files import file_to_write, whole_file


def read_at(file: BinaryIO, offset: int, length: int) -> bytes:
    """Return `length` bytes of a model's file. Raises TierReadError, and ModelFileError where they are not there."""
    found = b""
    try:
        while len(found) < length and (more := os.pread(file.fileno(), length - len(found), offset + len(found))):
            found += more
    except OSError as error:
        at = f"at byte {offset + len(found):,}"
        raise TierReadError(f"{file.name}: cannot be read {at} ({error.strerror}); check the drive") from error
    if len(found) < length:
        raise ModelFileError(
            f"{file.name}: ended at byte {offset + len(found):,}, {offset + length:,} are needed; it changed while it "
            "was read: try again",
            found_bytes=offset + len(found),
            needed_bytes=offset + length,
        )
    return found


def check_target(target: Path, models: Iterable[Path], what: str, is_replacing: bool = True) -> Path:
    """Return the file that `target` is or will be, for `written`.

    Raises ConfigError where it can be no file, is one of `models`, which are `what`, or is not to be replaced.
    """
    if target.exists() and any(target.samefile(model) for model in models):
        raise ConfigError(f"{target}: is {what}; choose another name")
    place = file_to_write(target, str(target), is_replacing)
    if not place.parent.is_dir():
        raise ConfigError(f"{target}: cannot be written: its folder is not there; make it, or choose another")
    return place


@contextlib.contextmanager
def written(target: Path, size_bytes: int, size: str) -> Iterator[Path]:
    """Give the draft of `target`, which takes its place at the end of the block; an exception leaves no file behind.

    size: in words. Raises TierReadError where the disk fails.
    """
    try:
        with whole_file(target) as draft:
            yield draft
    except EdgeRunError:  # of the model's file, and an OSError perhaps
        raise
    except OSError as error:
        raise TierReadError(
            f"{target}: writing {size} failed: {error.strerror}; check the disk and the folder's permissions",
            needed_bytes=size_bytes,
        ) from error
