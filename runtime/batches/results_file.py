"""The results of a batch, a line of JSON each: written so that whatever ends the process, a line is whole or not there.

A run that is started again finds what is done, and does the rest. A line that was cut off is taken back first.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from edge_run.base.closing import Closing
from edge_run.base.errors import ConfigError, TierReadError, reason_of, system_errors
from edge_run.runtime.server.bodies import MOST_BODY_BYTES

BEGINNING = b'{"id":"batch_req_'  # of every line that is written here


class ResultsFile(Closing):
    """The results of one batch. One process at a time has it.

    done: what the results are known by that are there: the `custom_id` of a request, the number of a line that is none.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`, or make it. Raises ConfigError for a file of another kind, or one that another run writes.

        Raises TierReadError where the drive refuses to lock or to read it.
        """
        self.path = path
        if path.exists() and not path.is_file():
            raise ConfigError(f"results {path}: cannot be written (it is no file); give another one (-o)")
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(
                f"results {path}: cannot be written ({reason_of(error)}); give another one (-o)"
            ) from error
        try:
            with system_errors(f"results {path}"):
                self._lock()
                self.done = self._read()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._is_open = True

    def add(self, key: str | int, status: int, body: bytes | Mapping[str, Any]) -> None:
        """Write a result, durably: it is never computed again. key: as in `done`. Raises TierReadError."""
        body = msgspec.Raw(body) if isinstance(body, bytes) else body
        identity = uuid.uuid4().hex
        response = {"status_code": status, "request_id": f"req_{identity}", "body": body}
        of_what = {"custom_id": key} if isinstance(key, str) else {"custom_id": None, "line": key}
        document = {"id": f"batch_req_{identity}", **of_what, "response": response, "error": None}
        line = msgspec.json.encode(document) + b"\n"
        start = os.fstat(self._descriptor).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
            os.fdatasync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):  # or the next run takes it back
                os.ftruncate(self._descriptor, start)
            raise TierReadError(f"results {self.path}: cannot be written ({reason_of(error)})") from error
        self.done.add(key)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"results {self.path}: another run writes them; wait for it, or give another -o"
            ) from None

    def _read(self) -> set[str | int]:
        """Return whose results are there, and take back a line of ours that was cut off."""
        done: set[str | int] = set()
        end = 0
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            for number in itertools.count(1):
                line = file.readline(MOST_BODY_BYTES)
                if not line.endswith(b"\n"):
                    if not _is_ours(line):
                        raise self._foreign(number)
                    line += file.readline()
                if not line.endswith(b"\n"):
                    break
                done.add(self._key_of(number, line))
                end += len(line)
        os.ftruncate(self._descriptor, end)
        return done

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
        return ConfigError(f"results {self.path}: line {number} is no result of a batch; give another file (-o)")


def _is_ours(part: bytes) -> bool:
    """Return whether what lacks its end may be a line of ours. A power cut may have left zeros in place of the rest."""
    begun = part[: 2 * len(BEGINNING)].rstrip(b"\0").replace(b" ", b"")[: len(BEGINNING)]
    return begun == BEGINNING or (BEGINNING.startswith(begun) and len(part) < MOST_BODY_BYTES)
