"""Records what a decoder was told since it was empty, so that other devices can rebuild its caches bit for bit.

Batches are recorded as they were run, because logits depend on the width of passes. A batch that a rewind takes back
wholly is removed from the log; a batch that is taken back in part stays, followed by the rewind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edge_run.base.protocols import BatchToken
from edge_run.runtime.mesh.messages import Command, Decode, Operate


class MeshLog:
    """The commands that lead from empty caches to what they hold. Not thread-safe."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._seconds: list[float] = []

    def __iter__(self) -> Iterator[Command]:
        return iter(tuple(self._commands))

    def __len__(self) -> int:
        return len(self._commands)

    @property
    def tokens(self) -> int:
        """Tokens to be computed when all is said again."""
        return sum(len(command.batch) for command in self._commands if isinstance(command, Decode))

    def seconds(self, usual_token_s: float) -> float:
        """Return what all that takes to be said again: wide passes what they took, those of one token the usual."""
        single = [isinstance(command, Decode) and len(command.batch) == 1 for command in self._commands]
        wide_s = sum(seconds for seconds, is_single in zip(self._seconds, single, strict=True) if not is_single)
        return wide_s + sum(single) * usual_token_s

    def add_batch(self, batch: Sequence[BatchToken], seconds: float = 0.0) -> None:
        """A batch was decoded, in so many seconds."""
        self._note(Decode(tuple(batch)), seconds)

    def add(self, command: Operate) -> None:
        """The caches were changed otherwise than by decoding or rewinding."""
        self._note(command)

    def rewind(self, sequence: int, position: int, end: int) -> None:
        """`sequence` was to be cut at `position`, and ends at `end` now."""
        while self._commands and _is_of(self._commands[-1], sequence) and _first(self._commands[-1]) >= end:
            self._commands.pop()
            self._seconds.pop()
        if any(_touches(command, sequence, end) for command in self._commands):
            self._note(Operate("rewind", (sequence, position)))

    def clear(self) -> None:
        """The caches are empty."""
        self._commands.clear()
        self._seconds.clear()

    def _note(self, command: Command, seconds: float = 0.0) -> None:
        self._commands.append(command)
        self._seconds.append(seconds)


def _is_of(command: Command, sequence: int) -> bool:
    """Return whether `command` does nothing but decode tokens of `sequence`, or cut it."""
    if isinstance(command, Operate):
        return command.what == "rewind" and command.numbers[0] == sequence
    return all(token.sequence == sequence and not token.branches for token in command.batch)


def _first(command: Command) -> int:
    return min(token.position for token in command.batch) if isinstance(command, Decode) else command.numbers[1]


def _touches(command: Command, sequence: int, end: int) -> bool:
    """Return whether `command` left anything in `sequence` from position `end` on, or may have."""
    if isinstance(command, Operate):
        return command.what != "rewind"
    return any(token.position >= end and sequence in (token.sequence, *token.branches) for token in command.batch)
