"""The results of a batch, a line of JSON each: written so that whatever ends the process, a line is whole or not there.

A run that is started again finds what is done, and does the rest. A line that was cut off is taken back first.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edge_run.base.closing import Closing
from edge_run.base.errors import ConfigError, TierReadError, reason_of, system_errors
from edge_run.base.files.whole import sync
from edge_run.devices.host.locks import NO_LOCKS, fcntl
from edge_run.runtime.server.bodies import MOST_BODY_BYTES

BEGINNING = b'{"id":"batch_req_'  # of every line that is written here


class ResultsFile(Closing):
    """The results of one batch. One process at a time has it.

    Results that are to come after others, which are not there yet, are held in a second file beside it until then.

    done: what the results are known by that are there: the `custom_id` of a request, the number of a line that is none.
    is_locked: whether no other run can write them; a file system, or a system, may have no locks.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`, or make it. Raises ConfigError for a file of another kind, or one that another run writes.

        Raises TierReadError where the drive refuses to lock or to read it.
        """
        self.path, self._held_path = path, path.parent / f"{path.name}.held"  # also of "." and "/", which have no name
        self._held: _Lines | None = None
        self._places: dict[str | int, tuple[int, int]] = {}  # of what is held
        with contextlib.ExitStack() as undo:
            self._lines = _Lines(path)
            undo.callback(self._lines.abandon)
            self.is_locked = self._lines.is_locked
            self.done = {key for key, _, _ in self._lines.read()}
            if self._held_path.exists():
                self._held = _Lines(self._held_path)
                undo.callback(self._held.close)
                found = {key: (start, length) for key, start, length in self._held.read()}
                if self._lines.is_new and not self.done:  # what is held is of results that somebody has removed
                    self._held.clear()
                else:
                    self._places = {key: place for key, place in found.items() if key not in self.done}
            undo.pop_all()

    def add(self, key: str | int, status: int, body: bytes | Mapping[str, Any]) -> None:
        """Write a result, durably: it is never computed again. key: as in `done`. Raises TierReadError."""
        self._lines.append([_line(key, status, body)])
        self.done.add(key)

    def holds(self, key: str | int) -> bool:
        """Return whether a result is held."""
        return key in self._places

    def hold(self, key: str | int, status: int, body: bytes | Mapping[str, Any]) -> None:
        """Hold a result, durably: it is never computed again. Raises TierReadError."""
        if self._held is None:
            self._held = _Lines(self._held_path)
        line = _line(key, status, body)
        self._places[key] = self._held.append([line]), len(line)

    def add_held(self, keys: Sequence[str | int]) -> None:
        """Write results that are held, in this order. Raises TierReadError."""
        if not keys:
            return
        assert self._held
        self._lines.append(self._held.line(*self._places[key]) for key in keys)
        self.done.update(keys)
        for key in keys:
            del self._places[key]
        if not self._places:
            self._held.clear()

    def __exit__(self, *failure: object) -> None:
        """Close the file; where the block failed before anything was written, remove it if it was made here."""
        is_unused = any(failure) and not self._places  # what is held is read again beside its results only
        self._close_held()
        if is_unused:
            self._lines.abandon()
        self._lines.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._close_held()
        self._lines.close()

    def _close_held(self) -> None:
        if self._held:
            if not self._places:
                with contextlib.suppress(OSError):
                    self._held_path.unlink()  # while no other run can have opened it
            self._held.close()
            self._held = None


class _Lines:
    """A file of results, open for this process alone as far as the file system has locks. Raises as `ResultsFile`.

    is_new: whether it was made here.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor, self.is_new = path, -1, False
        if path.exists() and not path.is_file():
            raise ConfigError(f"results {path}: cannot be written (it is no file); give another one (-o)")
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        try:
            try:
                self._descriptor, self.is_new = os.open(path, flags | os.O_EXCL, 0o666), True
            except FileExistsError:
                self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise ConfigError(
                f"results {path}: cannot be written ({reason_of(error)}); give another one (-o)"
            ) from error
        try:
            with system_errors(f"results {path}"):
                self.is_locked = self._lock()
                if self.is_new:
                    sync(path.absolute().parent)
        except BaseException:
            self.close()
            raise

    def append(self, lines: Iterable[bytes]) -> int:
        """Write lines, durably, and return where they begin. Raises TierReadError; then they are not there."""
        start = -1
        try:
            start = os.fstat(self._descriptor).st_size
            for line in lines:
                written = 0
                while written < len(line):
                    written += os.write(self._descriptor, line[written:])
            getattr(os, "fdatasync", os.fsync)(self._descriptor)
            is_there = self._is_there()
        except OSError as error:
            with contextlib.suppress(OSError):  # or the next run takes them back
                if start >= 0:
                    os.ftruncate(self._descriptor, start)
            raise TierReadError(
                f"results {self._path}: cannot be written ({reason_of(error)}); the same command goes on once they can"
            ) from error
        if not is_there:
            raise TierReadError(
                f"results {self._path}: was removed or replaced while this run wrote it, and what was written is lost "
                "unless it has another name now; the same command answers what is missing"
            )
        return start

    def line(self, start: int, length: int) -> bytes:
        """Return the line that was written there. Raises OSError."""
        os.lseek(self._descriptor, start, os.SEEK_SET)  # what is written goes to the end all the same
        line = os.read(self._descriptor, length)
        if len(line) < length:
            raise OSError(errno.EIO, "it was cut while in use")
        return line

    def clear(self) -> None:
        """Forget all lines, as far as the drive does."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)

    def abandon(self) -> None:
        """Close the file, and remove it where it was made here and is empty. Idempotent."""
        if self.is_new and self._descriptor >= 0:
            with contextlib.suppress(OSError):  # while no other run can have it
                if os.fstat(self._descriptor).st_size == 0 and self._is_there():
                    self._path.unlink()
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def read(self) -> list[tuple[str | int, int, int]]:
        """Return the key, the place and the length of each line, and take back one of ours that was cut off."""
        found, end = list[tuple["str | int", int, int]](), 0
        with system_errors(f"results {self._path}"), os.fdopen(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            for number in itertools.count(1):
                line = file.readline(MOST_BODY_BYTES)
                if not line.endswith(b"\n"):
                    if not _is_ours(line):
                        raise self._foreign(number)
                    line += file.readline()
                if not line.endswith(b"\n"):
                    break
                found.append((self._key_of(number, line), end, len(line)))
                end += len(line)
            os.ftruncate(self._descriptor, end)
        return found

    def _lock(self) -> bool:
        if fcntl is None:
            return False
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"results {self._path}: another run writes them; wait for it, or give another -o"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return False
        return True

    def _is_there(self) -> bool:
        """Return whether the file still has its name. Raises OSError."""
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self._descriptor))

    def _key_of(self, number: int, line: bytes) -> str | int:
        """Return whose result a line is. Raises ConfigError where it is none."""
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            document = None
        found = document if isinstance(document, dict) and "response" in document else {}
        custom_id, line_number = found.get("custom_id"), found.get("line")
        if isinstance(custom_id, str):
            return custom_id
        if custom_id is None and isinstance(line_number, int):
            return line_number
        raise self._foreign(number)

    def _foreign(self, number: int) -> ConfigError:
        return ConfigError(f"results {self._path}: line {number} is no result of a batch; give another file (-o)")


def _line(key: str | int, status: int, body: bytes | Mapping[str, Any]) -> bytes:
    """Return a result as the file has it."""
    body = msgspec.Raw(body) if isinstance(body, bytes) else body
    identity = uuid.uuid4().hex
    response = {"status_code": status, "request_id": f"req_{identity}", "body": body}
    of_what = {"custom_id": key} if isinstance(key, str) else {"custom_id": None, "line": key}
    document = {"id": f"batch_req_{identity}", **of_what, "response": response, "error": None}
    return msgspec.json.encode(document) + b"\n"


def _is_ours(part: bytes) -> bool:
    """Return whether what lacks its end may be a line of ours. A power cut may have left zeros in place of the rest."""
    begun = part[: 2 * len(BEGINNING)].rstrip(b"\0").replace(b" ", b"")[: len(BEGINNING)]
    return begun == BEGINNING or (BEGINNING.startswith(begun) and len(part) < MOST_BODY_BYTES)
