"""The folder of a prompt cache: files of rows, in a folder for each model and numerics key, within a size limit.

A file's name says all that came before its rows (`tiers/kv/record.py`), so the files are a tree of prefixes without an
index, and several processes may read and write at once. Using a file makes it and those before it the newest. When
room is needed the oldest go first, of equally old ones those farthest from the root: nothing is left without what it
continues. The folder may be one where other programs keep files and folders, which are left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_run.base.config import PROMPT_CACHE_DAILY_BYTES
from edge_run.base.errors import ConfigError, TierReadError, option, reason_of
from edge_run.base.files.drafts import abandoned_drafts
from edge_run.base.files.texts import read_text_file
from edge_run.base.files.whole import whole_file
from edge_run.base.units import MIB, format_size
from edge_run.devices.host.locks import locked
from edge_run.runtime.keeping.daily import DailyWrites
from edge_run.runtime.keeping.identity import KeptIdentity
from edge_run.tiers.kv.block_file import FORMAT, RowsVoid

ABOUT, LOCK, CONVERSATIONS = "about.json", "lock", "conversations"
LEFT_FREE_BYTES = 64 * MIB  # of the disk, for others
_ROWS = ".rows"
_MOST_ABOUT_BYTES = 1 << 16
_NOTED = {"format", "library", "path", "file"}  # in ABOUT
_ROWS_NAME = rf"\d{{6,}}-[0-9a-f]+{re.escape(_ROWS)}"
_OURS = re.compile(rf"{_ROWS_NAME}|\.(?:{re.escape(ABOUT)}|{_ROWS_NAME})\.[-0-9a-f]+\.part", re.ASCII)  # or a draft
_LOOK_AGAIN_S = 1.0  # others may write there too
_UNNOTED_S = 3600.0  # after which nobody is about to note whose a folder is
_OTHERS_S = 7 * 86400.0  # after which nobody uses what another llama.cpp computed


@dataclass(frozen=True, slots=True)
class _KeptFile:
    path: Path
    used_ns: int
    depth: int
    size_bytes: int


class PromptStore:
    """What is kept for one model under one numerics key. Thread-safe but for `clean`.

    folder: of all models. most_bytes: what all of it may take. daily_bytes: what may be written to it in a day.
    why_no_writes: why nothing could be written there at the opening, where it is there to be read; else empty.
    """

    def __init__(
        self, folder: Path, identity: KeptIdentity, most_bytes: int, daily_bytes: int = PROMPT_CACHE_DAILY_BYTES
    ) -> None:
        """Make the folder, for this user alone. Raises TierReadError where it cannot be, and is not there yet."""
        self.folder, self._identity, self._most_bytes = folder, identity, most_bytes
        self.daily = DailyWrites(folder, daily_bytes)
        self._own = folder / identity.key.hex()
        self._known_bytes, self._looked_s = 0, float("-inf")
        self.why_no_writes = ""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.make_folder()
        except OSError as error:
            self.why_no_writes = reason_of(error)
            if not os.path.isdir(self._own):
                raise TierReadError(
                    f"{folder}: cannot keep prompts there ({self.why_no_writes}); give another folder with "
                    f"{option('prompt_cache')}, or off",
                    errno=error.errno,
                ) from error

    def has_folder(self) -> bool:
        """Return whether the folder of this model is there, with the note whose it is."""
        return is_there(self._own / ABOUT)

    def make_folder(self) -> None:
        """Make the folder of this model, and note whose it is, unless both is there. Raises OSError.

        The folder of all models is not made: where it is gone, its drive may be.
        """
        self._own.mkdir(exist_ok=True, mode=0o700)
        note, path = json.dumps({"format": FORMAT, **self._identity.facts}), self._own / ABOUT
        try:
            is_noted = read_text_file(path, ABOUT, _MOST_ABOUT_BYTES) == note
        except ConfigError:
            is_noted = False
        if not is_noted:
            with whole_file(path, 0o600) as draft:
                draft.write_text(note)

    def path_of(self, name: bytes, depth: int) -> Path:
        """Return where the rows `name` are, or would be; `depth`: how many blocks come before them."""
        return self._own / f"{depth:06d}-{name.hex()}{_ROWS}"

    def used(self, paths: Sequence[Path]) -> None:
        """Note that these files were used now."""
        now = time.time_ns()
        for path in paths:
            with contextlib.suppress(OSError):  # another process removed it
                os.utime(path, ns=(now, now))

    def make_room(self, size_bytes: int, needed: Collection[Path] = ()) -> bool:
        """Remove the least recently used files so that `size_bytes` more fit; return False where they cannot.

        needed: files that stay, as what is to be written continues them. Raises RowsVoid where all would be these.
        """
        if size_bytes > self._most_bytes:
            return False
        lacking_bytes = size_bytes + LEFT_FREE_BYTES - shutil.disk_usage(self.folder).free
        is_old = time.monotonic() - self._looked_s > _LOOK_AGAIN_S
        if is_old or lacking_bytes > 0 or self._known_bytes + size_bytes > self._most_bytes:
            with locked(self.folder / LOCK):
                files = sorted(_files(*_key_folders(self.folder)), key=lambda file: (file.used_ns, -file.depth))
                self._known_bytes, self._looked_s = sum(file.size_bytes for file in files), time.monotonic()
                if size_bytes + sum(file.size_bytes for file in files if file.path in needed) > self._most_bytes:
                    raise RowsVoid  # of this text nothing more has room; others are kept
                if lacking_bytes > sum(file.size_bytes for file in files if file.path not in needed):
                    return False  # the others would go in vain
                for file in files:
                    if lacking_bytes <= 0 and self._known_bytes + size_bytes <= self._most_bytes:
                        break
                    if file.path not in needed:
                        file.path.unlink(missing_ok=True)
                        self._known_bytes -= file.size_bytes
                        lacking_bytes -= file.size_bytes
        self._known_bytes += size_bytes
        return True

    def clean(self, say: Callable[[str], None]) -> None:
        """Remove what will not be used again, and say so: of another llama.cpp, or of a file that has changed."""
        removed_bytes = 0
        for other in _key_folders(self.folder):
            if other != self._own and self._is_useless(other):
                size_bytes = _size_bytes(other)
                shutil.rmtree(other, ignore_errors=True)
                removed_bytes += size_bytes - _size_bytes(other)
        for folder in (self.folder, self.folder / CONVERSATIONS, *_key_folders(self.folder)):
            with contextlib.suppress(OSError):
                for draft in abandoned_drafts(folder):
                    remove(draft)
        if removed_bytes:
            say(
                f"prompt cache: {format_size(removed_bytes)} removed, kept for another llama.cpp or for a model file "
                "that has changed since"
            )

    def _is_useless(self, folder: Path) -> bool:
        about, ours = _note_in(folder), self._identity.facts
        if not about:
            return _age_s(folder) > _UNNOTED_S  # nobody is just making it
        is_elsewhere = about.get("machine") != ours.get("machine")  # where the same path may be another file
        if about["format"] != FORMAT or about["library"] != ours["library"] or is_elsewhere:
            return _unused_s(folder) > _OTHERS_S  # it may be there, too, or on a machine with the same home
        return bool(about["path"] == ours["path"] and about["file"] != ours["file"])


def is_there(path: Path) -> bool:
    """Return whether there is a file at `path`, as far as the drive says."""
    return os.path.exists(path)  # where `Path.exists` raises


def remove(path: Path) -> None:
    """Remove a file of rows; one that the drive keeps, as after it was made read-only, stays."""
    with contextlib.suppress(OSError):
        path.unlink()


def erase(folder: Path) -> int:
    """Remove all rows that are kept in `folder`; return their bytes. Raises TierReadError where some stay."""
    folders = _key_folders(folder)
    removed_bytes = _size_bytes(*folders)
    for one in folders:
        shutil.rmtree(one, ignore_errors=True)
    for one in filter(Path.exists, folders):
        try:
            shutil.rmtree(one)
        except FileNotFoundError:
            pass
        except OSError as error:
            why = f"{reason_of(error)}; check its permissions, and end what uses it"
            raise TierReadError(f"{one}: cannot be removed ({why})", errno=error.errno) from error
    return removed_bytes


def kept_bytes(folder: Path) -> int:
    """Return what all rows that are kept in `folder` take."""
    return _size_bytes(*_key_folders(folder))


def _key_folders(folder: Path) -> list[Path]:
    """Return the folders of models in `folder`; those of other programs may have such names too."""
    with contextlib.suppress(OSError):
        return [path for path in folder.iterdir() if _is_hexadecimal(path.name) and path.is_dir() and _is_ours(path)]
    return []


def _is_hexadecimal(name: str) -> bool:
    return len(name) == 32 and not set(name) - set("0123456789abcdef")


def _is_ours(folder: Path) -> bool:
    """Return whether there is a note of ours in `folder`, or where the note is damaged, nothing but rows of ours."""
    if _note_in(folder):
        return True
    names = list[str]()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name != ABOUT and not _OURS.fullmatch(entry.name):
                return False
            names.append(entry.name)
    return bool(set(names) - {ABOUT})


def _note_in(folder: Path) -> dict[str, Any]:
    """Return what is noted in the folder of a model; empty where there is no such note."""
    try:
        note = json.loads(read_text_file(folder / ABOUT, ABOUT, _MOST_ABOUT_BYTES))
    except (ValueError, RecursionError):  # ConfigError is a ValueError
        return {}
    return note if isinstance(note, dict) and note.keys() >= _NOTED else {}


def _age_s(path: Path) -> float:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime
    return 0.0


def _unused_s(folder: Path) -> float:
    """Return how long nothing in `folder` was used."""
    return min([time.time() - file.used_ns / 1e9 for file in _files(folder)], default=_age_s(folder))


def _size_bytes(*folders: Path) -> int:
    return sum(file.size_bytes for file in _files(*folders))


def _files(*folders: Path) -> Iterator[_KeptFile]:
    """Yield the files of rows in the folders of models, as far as these can be read."""
    for folder in folders:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                if name.endswith(_ROWS):
                    path = folder / name
                    with contextlib.suppress(OSError, ValueError):
                        depth, status = int(name.partition("-")[0]), path.lstat()
                        yield _KeptFile(path, status.st_mtime_ns, depth, status.st_size)
