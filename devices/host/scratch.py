"""A file without a name, filled with noise, on which a drive is measured."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from edge_run.base.errors import TierReadError, reason_of, wording
from edge_run.base.units import MIB, format_size, round_down
from edge_run.tiers._libc import forget_pages
from edge_run.tiers.source import SourceFile

PIECE_BYTES = 8 * MIB
LEAST_BYTES = 32 * MIB
FREE_SHARE = 8  # at most an eighth of what is free


class NoScratchError(TierReadError):
    """There is no file to measure a drive on."""


@contextlib.contextmanager
def scratch_file(folder: Path, size_bytes: int, patience_s: float = 5.0) -> Iterator[SourceFile]:
    """Yield a file of `size_bytes` that cannot be compressed; less where the disk is full or slow to write.

    Its space is free again at the end of the block, however that comes: the file has lost its name before it is
    written. After `patience_s` no more is written. Raises NoScratchError.
    """
    with contextlib.closing(_written(folder, _size_bytes(folder, size_bytes), patience_s)) as source:
        yield source


def _size_bytes(folder: Path, wanted_bytes: int) -> int:
    free_bytes = shutil.disk_usage(folder).free
    size_bytes = min(wanted_bytes, round_down(free_bytes // FREE_SHARE, PIECE_BYTES))
    if size_bytes < min(wanted_bytes, LEAST_BYTES):
        needed_bytes = min(wanted_bytes, LEAST_BYTES) * FREE_SHARE
        raise NoScratchError(
            f"{folder}: measuring this disk needs {format_size(needed_bytes)} free, {format_size(free_bytes)} are; "
            "free some space, or measure a larger model there with "
            f"{wording('`edge-run probe --model FILE`', 'probe(model=FILE)')}",
            found_bytes=free_bytes,
            needed_bytes=needed_bytes,
        )
    return size_bytes


def _written(folder: Path, size_bytes: int, patience_s: float) -> SourceFile:
    path = folder / f".edge-run-{os.getpid()}-{secrets.token_hex(4)}"
    source = None
    try:
        with path.open("xb", buffering=0) as file:
            file.truncate(PIECE_BYTES)  # no more: some file systems have no holes, and would write it all
            source = SourceFile(path)
            path.unlink()
            source.path = folder  # what an error names
            source.size_bytes = min(size_bytes, _fill(file.fileno(), size_bytes, patience_s))
            return source
    except BaseException as error:
        if source is not None:
            source.close()
        with contextlib.suppress(OSError):
            path.unlink()
        if not isinstance(error, OSError):
            raise
        raise NoScratchError(
            f"{folder}: writing {format_size(size_bytes)} to measure this disk failed ({reason_of(error)}); "
            "measure another folder of it, or a larger model there, with "
            + wording(
                "`edge-run probe FOLDER` or `edge-run probe --model FILE`", "probe([FOLDER]) or probe(model=FILE)"
            ),
            needed_bytes=size_bytes,
        ) from error


def _fill(descriptor: int, size_bytes: int, patience_s: float) -> int:
    """Write noise, on the drive and not in the page cache when this returns; return how many bytes that are."""
    started, written_bytes = time.monotonic(), 0
    while written_bytes < size_bytes:
        noise = memoryview(os.urandom(PIECE_BYTES))
        while noise:
            noise = noise[os.write(descriptor, noise) :]
        os.fsync(descriptor)
        written_bytes += PIECE_BYTES
        if written_bytes >= LEAST_BYTES and time.monotonic() - started > patience_s:
            break
    forget_pages(descriptor)
    return written_bytes
