"""Files and folders of ours, written as a whole or not at all, and what is said where they cannot be."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import operator
import os
from collections.abc import Iterator
from pathlib import Path

from edge_run.base.errors import ConfigError, EdgeRunError, TierReadError, option, reason_of
from edge_run.base.files.drafts import draft_of, remove_abandoned_drafts
from edge_run.base.units import format_size

logger = logging.getLogger(__name__)


def file_to_write(path: Path, what: str, is_replacing: bool = True) -> Path:
    """Return `path`, or where it leads as a link: the file for `whole_file`, which would replace the link.

    what: the beginning of an error. Raises ConfigError where something is there that is no file, or a file that is not
    to be replaced.
    """
    place = Path(os.path.realpath(path)) if path.is_symlink() else path
    if place.exists() and not place.is_file():
        raise ConfigError(f"{what}: is there, and is no file; choose another name")
    if place.exists() and not is_replacing:
        raise _exists(what)
    return place


def _exists(what: str | Path) -> ConfigError:
    force = option("is_overwritten", True)
    return ConfigError(f"{what}: exists; choose another name, or replace it with {force}")


@contextlib.contextmanager
def whole_file(path: Path, mode: int = 0o666, *, is_durable: bool = False, is_replacing: bool = True) -> Iterator[Path]:
    """Yield the path of an empty draft beside `path`, which takes its place unless the block fails; else it is removed.

    mode: who may read and write it, less the umask. is_durable: after a power cut too it is there as a whole, or what
    was there before. is_replacing: else a file that is there by then stays. Raises OSError, and ConfigError for that.
    """
    with draft_of(path) as draft:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield draft
        if is_durable:
            sync(draft)
        if is_replacing:
            draft.replace(path)
        else:
            _place_new(draft, path)
        if is_durable:
            sync(path.parent)


def _place_new(draft: Path, path: Path) -> None:
    """Give a draft the name `path`. Raises ConfigError where something has it, OSError."""
    try:
        os.link(draft, path)  # the draft's own name goes where it is removed
    except FileExistsError:
        raise _exists(path) from None
    except OSError:  # the file system has one name for a file only: the last look is just before
        if os.path.lexists(path):
            raise _exists(path) from None
        draft.replace(path)


def common_mode(*paths: Path) -> int:
    """Return a mode, less the umask, with which nobody may read or write a new file who may not do so with `paths`.

    Its owner may in any case. What is not there does not count.
    """
    modes = [path.stat().st_mode for path in paths if path.exists()]
    return 0o600 | functools.reduce(operator.and_, modes, 0o666)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty draft folder beside `path`, for files; it becomes `path` unless the block fails, else is removed.

    `path`, as `folder_to_write` returns it, is not there or empty: the folder is there with all its files or not at
    all, after a power cut too. Raises OSError.
    """
    with draft_of(path) as draft:
        draft.mkdir()
        yield draft
        place_folder(draft, path)


def place_folder(draft: Path, path: Path) -> None:
    """Have a draft folder take the place of `path`, as `whole_folder` does. Raises OSError."""
    for one in (*draft.iterdir(), draft):
        sync(one)
    draft.rename(path)
    sync(path.parent)


def reserve_file(path: Path, size_bytes: int, mode: int = 0o666) -> None:
    """Make a file for `fill_file`, with so much room on the disk. Raises OSError where there is not so much.

    mode: who may read and write it, less the umask. A file system that cannot keep room keeps none.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise


def fill_file(path: Path, content: bytes) -> None:
    """Write `content` into a file of `reserve_file`: into its room, of which the rest is given back. Raises OSError."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def folder_to_write(path: Path, what: str) -> Path:
    """Return `path`, or where it leads as a link: the folder for `whole_folder`, which takes its place.

    what: the beginning of an error. Raises ConfigError where something is there that is no empty folder, or one that no
    other can take the place of.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_dir():
        raise ConfigError(f"{what}: is there, and is no folder; choose another name")
    if place.is_dir() and (found := next(place.iterdir(), None)):
        raise ConfigError(f"{what}: holds {found.name}; choose a new or an empty folder")
    if place.is_dir() and (place.is_mount() or place.samefile(os.curdir)):
        raise ConfigError(f"{what}: is the current folder or a drive; name a new folder in it")
    return place


def sync(path: Path) -> None:
    """Return once what a file holds, or which files a folder holds, is on the drive; of folders not every one can.

    Some file systems cannot, and a folder may be there to be written only. Raises OSError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        cannot = isinstance(error, PermissionError) or error.errno in (errno.EINVAL, errno.EOPNOTSUPP)
        if not (cannot and path.is_dir()):
            raise


def check_room(target: Path, needed_bytes: int, advice: str) -> None:
    """Remove what killed processes left of `target`; raise TierReadError where its disk has no room for so much.

    Its folder may not be there yet.
    """
    remove_abandoned_drafts(target)
    import shutil  # which most commands do without

    free_bytes = shutil.disk_usage(next(one for one in target.absolute().parents if one.exists())).free
    if needed_bytes > free_bytes:
        raise TierReadError(
            f"{target}: {format_size(needed_bytes)} are needed, the disk has {format_size(free_bytes)} free; free some "
            f"space, or choose {advice}",
            needed_bytes=needed_bytes,
            found_bytes=free_bytes,
        )


@contextlib.contextmanager
def writing(what: str, advice: str = "choose another name") -> Iterator[None]:
    """Raise TierReadError where the system refuses to write `what` in this block."""
    try:
        yield
    except OSError as error:
        if isinstance(error, EdgeRunError):
            raise
        raise TierReadError(f"{what}: cannot be written ({reason_of(error)}); {advice}", errno=error.errno) from error


def keep_file(path: Path, content: bytes, what: str) -> None:
    """Write a whole file of a cache, for its owner alone; that it cannot be written is no error, and is logged.

    what: what it keeps.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, 0o600) as draft:
            draft.write_bytes(content)
    except OSError as error:
        logger.info("%s cannot be kept in %s: %s", what, path.parent, error)
