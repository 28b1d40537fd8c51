"""Files that say which processes are alive: a process keeps its file locked, and the lock ends with the process.

The locks are those of flock(2). Such a lock belongs to an open file, and so also to copies of that file in forked
children; this module closes the copies in every child that Python forks. A lock that is still held after its process
is gone belongs to a child, and counts for nothing; whether a process is gone can be told of this machine's only, and of
another machine's, where they share the folder, the lock says all. Where there is no flock, as on Windows, there is no
ledger.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from edge_run.base.process_ids import is_running, process_scope

try:
    import fcntl as _fcntl
except ImportError:  # not a POSIX system
    _fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

fcntl: Any = _fcntl
HAS_LOCKS = fcntl is not None
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # how file systems say that they have none
LONGEST_WAIT_S = 5.0
_WAIT_S = 0.002
_MOST_BYTES = 1 << 16
_held: set[int] = set()  # descriptors with locks of ours


def user_folders() -> list[Path]:
    """Return where files about a user's processes may lie, best first, and in the same order in every process.

    The temporary folder of the environment comes last: it differs from one process of a user to the next. /run/user
    differs too: it is there during a session only, and a job of cron's has none.
    """
    if not hasattr(os, "geteuid"):
        return []
    user, folders = os.geteuid(), ["/tmp", "/var/tmp"]
    with contextlib.suppress(OSError):  # there is none
        folders.append(tempfile.gettempdir())
    return [Path(f"/run/user/{user}/edge-run"), *(Path(one, f"edge-run-{user}") for one in dict.fromkeys(folders))]


def own_folders(folders: Iterable[Path]) -> list[Path]:
    """Return those of `folders` that are ours alone and can be written to.

    The first is made where its parent is there, and is the one to write to; the others are where they were made before.
    """
    own: dict[tuple[int, int], Path] = {}  # /var/tmp may be a link to /tmp
    for folder in folders if HAS_LOCKS else ():
        with contextlib.suppress(OSError):
            if not own:
                folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            if status.st_mode & 0o077:
                folder.chmod(0o700)
            if os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                own.setdefault((status.st_dev, status.st_ino), folder)
    return list(own.values())


class LivingFile:
    """A file of this process in `folder`, locked until it is removed or the process ends. Raises OSError."""

    def __init__(self, folder: Path, prefix: str, content: bytes) -> None:
        self._descriptor, name = tempfile.mkstemp(prefix=f"{prefix}{os.getpid()}-{process_scope()}-", dir=folder)
        self._path, self._pid = Path(name), os.getpid()
        _held.add(self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._descriptor, content)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove it. Idempotent; does nothing in a forked child, whose file it is not."""
        if self._pid == os.getpid() and self._descriptor in _held:
            with contextlib.suppress(OSError):
                self._path.unlink()
            _close(self._descriptor)
        self._pid = 0


def read_living(folder: Path, prefix: str) -> Iterator[bytes]:
    """Yield what the files of living processes say, and remove the others. Nobody may be making one meanwhile.

    A folder that cannot be read says nothing.
    """
    paths: list[Path] = []
    with contextlib.suppress(OSError):
        paths = sorted(folder.glob(f"{prefix}*"))
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _is_free(descriptor) or not _may_live(path.name.removeprefix(prefix)):
                    path.unlink(missing_ok=True)
                else:
                    yield os.pread(descriptor, _MOST_BYTES, 0)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of the file at `path` in this block; go on without it when it cannot be had in LONGEST_WAIT_S."""
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _held.add(descriptor)
        _wait_for(descriptor)
    except OSError as error:
        logger.info("%s: cannot be locked (%s)", path, error)
    try:
        yield
    finally:
        if descriptor in _held:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing would leave it to a child that has the file too
            _close(descriptor)


def _wait_for(descriptor: int) -> None:
    deadline = time.monotonic() + LONGEST_WAIT_S
    while not _is_free(descriptor):
        if time.monotonic() > deadline:
            raise TimeoutError(f"somebody has held it for {LONGEST_WAIT_S:.0f} s")
        time.sleep(_WAIT_S)


def _is_free(descriptor: int) -> bool:
    """Take the lock of an open file, and return whether it could be had."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _may_live(name: str) -> bool:
    """Return whether the process that a file is named after is there, as far as can be told."""
    pid, _, rest = name.partition("-")
    if rest.partition("-")[0] != process_scope() or not pid.isdecimal():
        return True
    return is_running(int(pid))


def _close(descriptor: int) -> None:
    _held.discard(descriptor)
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _close_in_child() -> None:
    for descriptor in list(_held):
        _close(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
