"""Conversations that were kept: what was said, and which rows of the prompt cache belong to it.

A conversation is one file, replaced as a whole after each answer, so that it is there up to its last complete answer
whatever happens. What its rows are not kept for is computed again from the text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_run.base.errors import ConfigError, TierReadError, reason_of
from edge_run.base.files.texts import read_text_file
from edge_run.base.files.whole import whole_file
from edge_run.base.units import MIB
from edge_run.devices.host.locks import HAS_LOCKS, NO_LOCKS, LivingFile, locked, read_living
from edge_run.runtime.keeping.keeper import ConversationRows
from edge_run.runtime.keeping.store import CONVERSATIONS
from edge_run.tiers.kv.record import RowPass

FORMAT = 1
MOST_BYTES = 64 * MIB
_NAME = re.compile(r"\w[\w.-]{0,63}", re.ASCII)
_ENDING = ".json"
_DRAFT = re.compile(r"\.\w[\w.-]{0,63}\.json\.[1-9]\d*-[0-9a-f-]+\.part", re.ASCII)
_BEGINNING = re.compile(rb'\{"format": \d+, "model": "')  # as `save` writes it, whatever else is damaged
_HELD, _LOCK = ".held-", ".lock"
_MOST = 2**31


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation.

    name: its own. model: the path of the model. parts: what was said, as (role, text). tokens and passes: of its rows.
    """

    name: str
    model: str
    parts: Sequence[tuple[str, str]]
    tokens: Sequence[int] = ()
    passes: Sequence[RowPass] | None = None

    @property
    def rows(self) -> ConversationRows:
        """What its rows are named after."""
        return ConversationRows(self.tokens, self.passes)


class Conversations:
    """The conversations in a folder of a prompt cache."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_begun = folder / CONVERSATIONS, False

    def hold(self, name: str) -> LivingFile | None:
        """Have the conversation `name` for this process alone, until what is returned is removed or the process ends.

        None is returned where the system, or the file system, has no locks. Raises ConfigError where another process
        has it, or for a bad name, and TierReadError.
        """
        self._path(name)
        try:
            self._make_folder()
            with locked(self._folder / _LOCK):
                if name.encode() in read_living(self._folder, _HELD):
                    raise ConfigError(f"{name}: another chat goes on with it; give another name, or end that chat")
                return LivingFile(self._folder, _HELD, name.encode()) if HAS_LOCKS else None
        except OSError as error:
            if error.errno in NO_LOCKS:
                return None
            raise TierReadError(
                f"{self._folder}: conversations cannot be kept ({reason_of(error)})", errno=error.errno
            ) from error

    def save(self, conversation: Conversation) -> None:
        """Keep a conversation in place of what has its name. Raises ConfigError for a bad name, TierReadError."""
        path = self._path(conversation.name)
        fields = {
            "format": FORMAT,
            "model": conversation.model,
            "parts": list(conversation.parts),
            "tokens": list(conversation.tokens),
            "passes": None if conversation.passes is None else _runs(conversation.passes),
        }
        try:
            self._make_folder()
            with (
                whole_file(path, 0o600, is_durable=True) as draft,
                draft.open("w", encoding="utf-8", errors="surrogatepass") as file,
            ):
                json.dump(fields, file)
        except OSError as error:
            raise TierReadError(f"{path}: the conversation cannot be kept ({reason_of(error)})") from error

    def _make_folder(self) -> None:
        """Make the folders, once only: where they are gone, their drive may be. Raises OSError."""
        if not self._is_begun:
            self._folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._folder.mkdir(exist_ok=True, mode=0o700)
            self._is_begun = True

    def load(self, name: str) -> Conversation:
        """Return a conversation.

        Raises ConfigError where there is none of this name, or its file is damaged, and TierReadError.
        """
        path = self._path(name)
        if not self.has(name):
            raise ConfigError(f"{name}: no such conversation; edge-run sessions list names all")
        text = read_text_file(path, str(path), MOST_BYTES)
        try:
            return _conversation(name, json.loads(text))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path}: is damaged, or of another version of edge-run; remove it") from error

    def has(self, name: str) -> bool:
        """Return whether a conversation of this name is kept.

        Raises ConfigError for a bad name, and TierReadError where the drive does not say: "no" might have it replaced.
        """
        path = self._path(name)
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise TierReadError(f"{path}: cannot be read ({reason_of(error)})", errno=error.errno) from error
        return True

    def names(self) -> list[tuple[str, float]]:
        """Return the names, and when each was last changed (seconds since the epoch), the latest first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f"*{_ENDING}"):
                with contextlib.suppress(OSError):
                    if _NAME.fullmatch(path.name.removesuffix(_ENDING)):
                        found.append((path.name.removesuffix(_ENDING), path.stat().st_mtime))
        return sorted(found, key=lambda entry: (-entry[1], entry[0]))

    def latest(self) -> Conversation:
        """Return the conversation that was changed last. Raises ConfigError where there is none."""
        if not (names := self.names()):
            raise ConfigError(
                f"--continue: no conversation is kept in {self._folder}; begin one with edge-run chat MODEL"
            )
        return self.load(names[0][0])

    def remove(self, name: str) -> bool:
        """Remove a conversation; return whether there was one. Raises ConfigError, TierReadError."""
        return _remove(self._path(name))

    def erase(self) -> int:
        """Remove all conversations, and what was left where one was being saved; return how many there were.

        What other programs have there stays. So does the file of the lock: who waits for it would have the lock of a
        file that is not there any more.

        Raises TierReadError.
        """
        for draft in list(self._folder.glob(".*.part")):
            if _DRAFT.fullmatch(draft.name):
                _remove(draft)
        with locked(self._folder / _LOCK):
            list(read_living(self._folder, _HELD))  # which removes those of processes that are gone
        return sum(_remove(path) for path in list(self._folder.glob(f"*{_ENDING}")) if _is_ours(path))

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"conversation {name[:80]!r}: give a name of up to 64 letters, digits, and _ - . in it")
        return self._folder / f"{name}{_ENDING}"


def _is_ours(path: Path) -> bool:
    """Return whether a file of the folder was written by `save`; other programs may have such names."""
    if not _NAME.fullmatch(path.name.removesuffix(_ENDING)) or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            beginning = file.read(64)
    except OSError as error:
        raise TierReadError(f"{path}: cannot be read ({reason_of(error)})", errno=error.errno) from error
    return _BEGINNING.match(beginning) is not None


def _remove(path: Path) -> bool:
    """Remove a file; return whether there was one. Raises TierReadError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise TierReadError(f"{path}: cannot be removed ({reason_of(error)})") from error
    return True


def _runs(passes: Sequence[RowPass]) -> list[tuple[int, int, int]]:
    """Return passes as (start, width, how many of these follow one another): a long answer is one run."""
    runs: list[tuple[int, int, int]] = []
    for start, width in passes:
        if runs and runs[-1][1] == width and runs[-1][0] + width * runs[-1][2] == start:
            runs[-1] = (runs[-1][0], width, runs[-1][2] + 1)
        else:
            runs.append((start, width, 1))
    return runs


def _conversation(name: str, fields: Any) -> Conversation:
    """Return the conversation in a file, every number of it checked. Raises ValueError, KeyError or TypeError."""
    if fields["format"] != FORMAT or not isinstance(fields["model"], str) or "\0" in fields["model"]:
        raise ValueError("format")
    parts = tuple((role, text) for role, text in fields["parts"])
    tokens = tuple(_number(token) for token in fields["tokens"])
    if not all(isinstance(word, str) for part in parts for word in part):
        raise TypeError("parts")
    passes: list[RowPass] | None = None
    if fields["passes"] is not None:
        passes = []
        for run in fields["passes"]:
            start, width, count = map(_number, run)
            end = passes[-1].start + passes[-1].width if passes else 0
            is_after = not passes or passes[-1].start < min(start, len(tokens))  # not billions of passes
            if width < 1 or not 1 <= count <= len(tokens) or start > end or not is_after:
                raise ValueError("passes")
            passes += [RowPass(start + i * width, width) for i in range(count)]
        if bool(tokens) != bool(passes) or (passes and not passes[-1].start < len(tokens) <= sum(passes[-1])):
            raise ValueError("passes")
    return Conversation(name, fields["model"], parts, tokens, passes)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(str(value)[:40])
    return value
