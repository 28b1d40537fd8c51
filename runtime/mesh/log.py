"""Records what a decoder was told since it was empty, so that other devices can rebuild its caches bit for bit.

Batches are recorded as they were begun, because logits depend on the width of passes. A batch that a rewind takes back
wholly is removed from the log; a batch that is taken back in part, or not finished yet, stays, followed by the rewind.

Answers that share passes end at different times, and guesses are taken back in part, so much that nobody holds any more
may stay. Where no sequence holds anything, the log is empty. One that has become too long is condensed: its passes are
then of the tokens that are held, in their order, and so narrower, as if fewer answers had shared them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from edge_run.base.protocols import BatchToken
from edge_run.runtime.mesh.messages import Command, Decode, Operate


@dataclass(slots=True)
class _Entry:
    """A command.

    seconds: that it took; None of a batch that is not finished.
    held: of a rewind, how many tokens its sequence held before.
    """

    command: Command
    seconds: float | None
    held: int = 0

    @property
    def tokens(self) -> int:
        """How many it has computed."""
        return len(self.command.batch) if isinstance(self.command, Decode) else 0


class MeshLog:
    """The commands that lead from empty caches to what they hold. Not thread-safe.

    tokens: to be computed when all is said again.
    """

    def __init__(self, most_tokens: int = sys.maxsize) -> None:
        """most_tokens: of a log that is not condensed; each other command counts as one."""
        self._entries: list[_Entry] = []
        self._held: dict[int, int] = {}  # tokens of each sequence
        self.tokens, self._most_tokens, self._limit = 0, most_tokens, most_tokens

    def __iter__(self) -> Iterator[Command]:
        return iter([entry.command for entry in self._entries])

    def __len__(self) -> int:
        return len(self._entries)

    def holds(self, batch: Sequence[BatchToken]) -> bool:
        """Return whether each sequence of `batch` holds all that comes before it there, and no more."""
        starts: dict[int, int] = {}
        for token in batch:
            for sequence in _sequences(token):
                starts[sequence] = min(token.position, starts.get(sequence, token.position))
        return all(self._held.get(sequence, 0) == start for sequence, start in starts.items())

    def seconds(self, usual_token_s: float) -> float:
        """Return what all that takes to be said again: wide passes what they took, those of one token the usual."""
        return sum(usual_token_s if one.tokens == 1 else one.seconds or 0.0 for one in self._entries)

    def add(self, command: Command, seconds: float | None = 0.0) -> None:
        """A command other than a rewind was carried out, in so many seconds; None: a batch was begun."""
        if isinstance(command, Decode):
            for token in command.batch:
                self._held.update(dict.fromkeys(_sequences(token), token.position + 1))
        elif command.what == "branch":
            sequence, *branches = command.numbers
            self._held.update(dict.fromkeys(branches, self._held.get(sequence, 0)))
        elif command.what == "keep":
            sequence, _, branch, *branches = command.numbers
            self._held[sequence] = self._held.get(branch, 0)
            self._held.update(dict.fromkeys(branches, 0))
        self._append(_Entry(command, seconds))
        self._shorten()

    def finished(self, command: Decode, seconds: float) -> None:
        """A batch that was begun is finished."""
        self._entry(command).seconds = seconds
        self._shorten()

    def forget(self, command: Decode) -> None:
        """A batch that was begun, if it was, is taken back."""
        if not any(entry.command is command for entry in reversed(self._entries)):
            return
        self._entries.remove(self._entry(command))
        self.tokens -= len(command.batch)
        for token in command.batch:
            for sequence in _sequences(token):
                self._held[sequence] = min(self._held[sequence], token.position)
        self._shorten()

    def rewind(self, sequence: int, end: int) -> None:
        """`sequence` was to be cut, and ends at `end` now."""
        held = self._held.get(sequence, 0)
        while self._entries and _is_of(last := self._entries[-1], sequence) and _first(last.command) >= end:
            held = last.held if isinstance(last.command, Operate) else _first(last.command)
            self.tokens -= self._entries.pop().tokens
        if held > end:
            self._append(_Entry(Operate("rewind", (sequence, end)), 0.0, held))
        self._held[sequence] = min(held, end)
        self._shorten()

    def _entry(self, command: Decode) -> _Entry:
        return next(entry for entry in reversed(self._entries) if entry.command is command)

    def _append(self, entry: _Entry) -> None:
        self._entries.append(entry)
        self.tokens += entry.tokens

    def _shorten(self) -> None:
        """Drop what nobody holds: where that is all, and where the log is too long."""
        is_too_long = self.tokens + len(self._entries) > self._limit
        if any(self._held.values()) and not is_too_long:
            return
        n_finished = next((i for i, one in enumerate(self._entries) if one.seconds is None), len(self._entries))
        if is_too_long or n_finished == len(self._entries):
            self._entries[:n_finished] = _condensed(self._entries[:n_finished])
            self.tokens = sum(entry.tokens for entry in self._entries)
            self._limit = max(self._most_tokens, 2 * (self.tokens + len(self._entries)))


@dataclass(eq=False, slots=True)
class _Held:
    """A token that was decoded after another one, and the sequences that hold it in the end, a bit for each."""

    token: BatchToken
    before: _Held | None
    sequences: int = 0


def _condensed(entries: Iterable[_Entry]) -> list[_Entry]:
    """Return entries that fill sequences with what they hold after `entries`, and with nothing else."""
    last: dict[int, _Held | None] = {}  # of each sequence, its last token
    passes: list[tuple[_Entry, list[_Held]]] = []
    for entry in entries:
        command = entry.command
        if isinstance(command, Decode):
            passes.append((entry, []))
            for token in command.batch:
                passes[-1][1].append(_Held(token, last.get(token.sequence)))
                last.update(dict.fromkeys(_sequences(token), passes[-1][1][-1]))
            continue
        sequence, *numbers = command.numbers
        if command.what == "branch":
            last.update(dict.fromkeys(numbers, last.get(sequence)))
        elif command.what == "keep":  # a branch begins as its sequence does
            last[sequence] = last.get(numbers[1])
            last.update(dict.fromkeys(numbers[2:]))
        else:
            last[sequence] = next((one for one in _back(last.get(sequence)) if one.token.position < numbers[0]), None)
    for sequence, newest in last.items():
        for one in _back(newest):
            one.sequences |= 1 << sequence
    batches = [(entry, tuple(_held_token(one) for one in tokens if one.sequences)) for entry, tokens in passes]
    return [replace(entry, command=Decode(batch)) for entry, batch in batches if batch]


def _back(token: _Held | None) -> Iterator[_Held]:
    """Yield a token and those before it, the last one first."""
    while token is not None:
        yield token
        token = token.before


def _held_token(one: _Held) -> BatchToken:
    """Return a token for the sequences that hold it."""
    found = [sequence for sequence in range(one.sequences.bit_length()) if one.sequences >> sequence & 1]
    if {*found} == {*_sequences(one.token)}:
        return one.token
    first = one.token.sequence if one.token.sequence in found else found[0]
    return replace(one.token, sequence=first, branches=tuple(other for other in found if other != first))


def _sequences(token: BatchToken) -> tuple[int, ...]:
    return token.sequence, *token.branches


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
