"""Files: texts of others, read within limits, and files and folders of ours, written as a whole or not at all.

Ours lie in the user's own folders, as the XDG Base Directory Specification names them. A model's file has an identity,
by which whoever opens it again can tell whether it still is the one that it was.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import operator
import os
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from edge_run.base.errors import ConfigError, EdgeRunError, ModelFileError, TierReadError, reason_of
from edge_run.base.units import format_size

logger = logging.getLogger(__name__)

_ABANDONED_S = 60.0  # a draft that somebody writes is written to more often
_ABANDONED_ELSEWHERE_S = 3600.0  # one of another machine or container, or of before a restart: whichever it is
_DRAFT = re.compile(r"\..*\.([1-9]\d*)-(?:([0-9a-f]{8})-)?[0-9a-f]{8}\.part", re.ASCII | re.DOTALL)
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_drafts: set[Path] = set()  # that this process writes


def read_text_file(path: str | Path, what: str, most_bytes: int) -> str:
    """Return the text of the file at `path`, `~` replaced, of at most `most_bytes`, and no more of it is ever read.

    what: the beginning of an error. Raises ConfigError where it cannot be read, is longer, or is not UTF-8.
    """
    try:
        with open(os.path.expanduser(path), "rb") as file:
            return read_text(file, what, most_bytes)
    except OSError as error:
        why = reason_of(error)
        raise ConfigError(f"{what}: cannot be read ({why}); check the path and its permissions") from error
    except ConfigError:
        raise
    except ValueError as error:  # a name with a zero character
        raise ConfigError(f"{what}: cannot be read ({error}); check the path") from error


def read_text(file: BinaryIO, what: str, most_bytes: int) -> str:
    """Return all text of `file`; see `read_text_file`. Raises OSError where reading fails."""
    pieces, rest = [], most_bytes + 1
    while rest and (piece := file.read(min(rest, 1 << 20))):
        pieces.append(piece)
        rest -= len(piece)
    if not rest:
        raise ConfigError(f"{what}: longer than {format_size(most_bytes)}; shorten it", needed_bytes=most_bytes)
    try:
        return b"".join(pieces).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what}: not UTF-8 text ({error.reason} at byte {error.start:,}); save it as UTF-8, as iconv -t UTF-8 does"
        ) from error


def key_lines(text: str) -> list[str]:
    """Return the keys in the text of a key file: one a line, without blanks around it; a line with # first is none."""
    return [key for line in text.splitlines() if (key := line.strip()) and not key.startswith("#")]


def file_to_write(path: Path, what: str, is_replacing: bool = True) -> Path:
    """Return `path`, or where it leads as a link: the file for `whole_file`, which would replace the link.

    what: the beginning of an error. Raises ConfigError where something is there that is no file, or a file that is not
    to be replaced.
    """
    place = Path(os.path.realpath(path)) if path.is_symlink() else path
    if place.exists() and not place.is_file():
        raise ConfigError(f"{what}: is there, and is no file; choose another name")
    if place.exists() and not is_replacing:
        raise ConfigError(f"{what}: exists; choose another name, or replace it with --force")
    return place


@contextlib.contextmanager
def whole_file(path: Path, mode: int = 0o666, *, is_durable: bool = False) -> Iterator[Path]:
    """Yield the path of an empty draft beside `path`, which takes its place unless the block fails; else it is removed.

    mode: who may read and write it, less the umask. is_durable: after a power cut too it is there as a whole, or what
    was there before. Raises OSError.
    """
    with draft_of(path) as draft:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield draft
        if is_durable:
            sync(draft)
        draft.replace(path)
        if is_durable:
            sync(path.parent)


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
        for one in (*draft.iterdir(), draft):
            sync(one)
        draft.rename(path)
        sync(path.parent)


@contextlib.contextmanager
def reserved(path: Path, size_bytes: int) -> Iterator[None]:
    """Keep so much of the disk that `path` is to lie on for this process, until the end of this block.

    Raises OSError before it, where there is not so much. A file system that cannot keep room keeps none.
    """
    with draft_of(path) as draft:
        with draft.open("wb") as file:
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size_bytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        yield


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


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yield the name of a draft of `path`; what has it at the end of the block, or when a signal ends us, goes."""
    draft = path.with_name(f".{path.name}.{os.getpid()}-{process_scope()}-{os.urandom(4).hex()}.part")
    _drafts.add(draft)
    try:  # also of the creation: a Ctrl-C may come right after it
        yield draft
    finally:
        _remove(draft)
        _drafts.discard(draft)


def _remove(draft: Path) -> None:
    """Remove a file, or a folder and what it holds, if it is there."""
    with contextlib.suppress(OSError):
        if draft.is_dir():
            import shutil  # which most commands do without

            shutil.rmtree(draft)
        else:
            draft.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Return once what a file holds, or which files a folder holds, is on the drive; of folders not every one can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def remove_drafts() -> None:
    """Remove the drafts of this process, which a signal is about to end."""
    for draft in list(_drafts):
        if _writer(draft) == os.getpid():  # else of the process that this one was forked from
            _remove(draft)


def remove_abandoned_drafts(path: Path) -> None:
    """Remove drafts of `path` whose process was killed, or ended with the power."""
    with contextlib.suppress(OSError):
        for found in abandoned_drafts(path.parent):
            if found.name.startswith(f".{path.name}."):
                _remove(found)


def abandoned_drafts(folder: Path) -> list[Path]:
    """Return the drafts in `folder` whose process was killed, or ended with the power. Raises OSError."""
    return [found for found in sorted(folder.glob(".*.part")) if found not in _drafts and _is_abandoned(found)]


def _is_abandoned(draft: Path) -> bool:
    if not (found := _DRAFT.fullmatch(draft.name)):
        return False
    try:
        parts = [draft, *(draft.iterdir() if draft.is_dir() else ())]
        silent_s: float = time.time() - max(part.stat().st_mtime for part in parts)
    except OSError:  # whoever writes it was done just now
        return False
    if found[2] != process_scope():
        return silent_s > _ABANDONED_ELSEWHERE_S
    return silent_s > _ABANDONED_S and not _is_running(int(found[1]))


def _writer(draft: Path) -> int | None:
    """Return the number of the process that made a draft; None for a file of another name."""
    found = _DRAFT.fullmatch(draft.name)
    return int(found[1]) if found else None


def pid_namespace() -> int:
    """Return within what a process id of ours stands for one process; in another container it is another's."""
    try:
        return _NAMESPACE.stat().st_ino
    except OSError:
        return 0


def process_scope() -> str:
    """Return eight letters for where a process id of ours stands for one process: here, until the machine restarts.

    On another machine they are others, though the number of the first namespace is the same on all.
    """
    boot = b""
    with contextlib.suppress(OSError), open(_BOOT, "rb") as file:
        boot = file.read(64)
    return f"{zlib.crc32(boot + str(pid_namespace()).encode()):08x}"


def _is_running(process: int) -> bool:
    """Return whether another process of this number may run."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


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


def config_folder() -> Path:
    """Return where settings lie: `$XDG_CONFIG_HOME/edge-run`, or `~/.config/edge-run`.

    Where the user has no home folder, the path begins with `~`.
    """
    return _folder("XDG_CONFIG_HOME", ".config")


def cache_folder() -> Path:
    """Return where temporary files may lie: `$XDG_CACHE_HOME/edge-run`, or `~/.cache/edge-run`. Raises ConfigError."""
    folder = _folder("XDG_CACHE_HOME", ".cache")
    if not folder.is_absolute():
        raise ConfigError("home folder: unknown; set HOME, or name a folder for small files with --cache-dir")
    return folder


def mesh_folder() -> Path:
    """Return where the device's key and its cluster are kept: `mesh` in `config_folder`. Raises ConfigError."""
    folder = config_folder() / "mesh"
    if not folder.is_absolute():
        raise ConfigError("home folder: unknown; set HOME, or XDG_CONFIG_HOME")
    return folder


def _folder(variable: str, default: str) -> Path:
    """Return edge-run's own folder under `$variable`, or under `~/default` where that is unset or relative."""
    base = Path(os.environ.get(variable) or "")
    return (base if base.is_absolute() else Path(os.path.expanduser("~"), default)) / "edge-run"
