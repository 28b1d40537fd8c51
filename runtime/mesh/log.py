"""Records what a decoder was told since it was empty, so that other devices can rebuild its caches bit for bit.

Batches are recorded as they were begun, because logits depend on the width of passes. A batch that a rewind takes back
wholly is removed from the log; a batch that is taken back in part, or not finished yet, stays, followed by the rewind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edge_run.runtime.mesh.messages import Command, Decode, Operate


@dataclass(slots=True)
class _Entry:
    """A command, and the seconds that it took; None of a batch that is not finished."""

    command: Command
    seconds: float | None


class MeshLog:
    """The commands that lead from empty caches to what they hold. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def __iter__(self) -> Iterator[Command]:
        return iter([entry.command for entry in self._entries])

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Tokens to be computed when all is said again."""
        return sum(len(command.batch) for command in self if isinstance(command, Decode))

    def seconds(self, usual_token_s: float) -> float:
        """Return what all that takes to be said again: wide passes what they took, those of one token the usual."""
        return sum(
            usual_token_s if isinstance(one.command, Decode) and len(one.command.batch) == 1 else one.seconds or 0.0
            for one in self._entries
        )

    def add(self, command: Command, seconds: float | None = 0.0) -> None:
        """A command other than a rewind was carried out, in so many seconds; None: a batch was begun."""
        self._entries.append(_Entry(command, seconds))

    def finished(self, command: Decode, seconds: float) -> None:
        """A batch that was begun is finished."""
        self._entry(command).seconds = seconds

    def forget(self, command: Decode) -> None:
        """A batch that was begun is taken back."""
        self._entries.remove(self._entry(command))

    def rewind(self, sequence: int, position: int, end: int) -> None:
        """`sequence` was to be cut at `position`, and ends at `end` now."""
        while self._entries and _is_of(last := self._entries[-1], sequence) and _first(last.command) >= end:
            self._entries.pop()
        if any(_touches(command, sequence, end) for command in self):
            self.add(Operate("rewind", (sequence, position)))

    def _entry(self, command: Decode) -> _Entry:
        return next(entry for entry in reversed(self._entries) if entry.command is command)


def _is_of(entry: _Entry, sequence: int) -> bool:
    """Return whether a finished command does nothing but decode tokens of `sequence`, or cut it."""
    command = entry.command
    if isinstance(command, Operate):
        return command.what == "rewind" and command.numbers[0] == sequence
    return entry.seconds is not None and all(
        token.sequence == sequence and not token.branches for token in command.batch
    )


def _first(command: Command) -> int:
    return min(token.position for token in command.batch) if isinstance(command, Decode) else command.numbers[1]


def _touches(command: Command, sequence: int, end: int) -> bool:
    """Return whether `command` left anything in `sequence` from position `end` on, or may have."""
    if isinstance(command, Operate):
        return command.what != "rewind"
    return any(token.position >= end and sequence in (token.sequence, *token.branches) for token in command.batch)
