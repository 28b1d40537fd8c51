"""The files of a tool: the model that is read, and what is written, which is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from edge_run.base.errors import ConfigError, ModelFileError, TierReadError, not_opened, reason_of
from edge_run.base.files.whole import common_mode, file_to_write, whole_file


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Give a model's file, to be read with `read_at`. Raises ModelFileError where it cannot be opened."""
    try:
        file = path.open("rb")
    except OSError as error:
        why = reason_of(error)
        raise not_opened(error, f"{path}: cannot be opened ({why}); check the drive and its permissions") from error
    with file:
        yield file


def read_at(file: BinaryIO, offset: int, length: int) -> bytes:
    """Return `length` bytes of a model's file. Raises TierReadError, and ModelFileError where they are not there."""
    found = b""
    try:
        while len(found) < length and (more := os.pread(file.fileno(), length - len(found), offset + len(found))):
            found += more
    except OSError as error:
        at = f"at byte {offset + len(found):,}"
        raise TierReadError(f"{file.name}: cannot be read {at} ({reason_of(error)}); check the drive") from error
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


class TargetFile:
    """A file that is being written, from its beginning on. Its methods raise TierReadError where the disk fails."""

    def __init__(self, file: BinaryIO, failure: Callable[[OSError], TierReadError]) -> None:
        self._file, self._failure = file, failure

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`; return how many bytes that are."""
        try:
            return self._file.write(data)
        except OSError as error:
            raise self._failure(error) from error

    def seek(self, place: int) -> None:
        """Go on writing at this byte."""
        try:
            self._file.seek(place)
        except OSError as error:
            raise self._failure(error) from error

    def tell(self) -> int:
        """Return the byte at which is written next."""
        return self._file.tell()


@contextlib.contextmanager
def written(
    target: Path, size_bytes: int, size: str, source: Path, *, is_replacing: bool = True
) -> Iterator[TargetFile]:
    """Give what takes the place of `target` at the end of the block, for good; an exception leaves no file behind.

    size: in words. source: it is made of this file, and who may not read that may not read it. is_replacing: else a
    target that is there by then stays, which is a ConfigError. Raises TierReadError where the disk fails, and what the
    block raises.
    """

    def failure(error: OSError) -> TierReadError:
        return TierReadError(
            f"{target}: writing {size} failed: {reason_of(error)}; check the disk and the folder's permissions",
            needed_bytes=size_bytes,
        )

    of_the_block: OSError | None = None
    try:
        mode = common_mode(source, target)
        with (
            whole_file(target, mode, is_durable=True, is_replacing=is_replacing) as draft,
            draft.open("wb") as file,
        ):
            try:
                yield TargetFile(file, failure)
            except OSError as error:  # of the model's files, or told by the target already
                of_the_block = error
                raise
            file.flush()
    except OSError as error:
        if error is of_the_block:
            raise
        raise failure(error) from error
