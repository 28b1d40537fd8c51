"""What the devices of a run say to each other over the data link: headers, batches as integers, and checks of both.

Every message names the epoch of the plan that it belongs to; a message of another epoch is nobody's. Commands of the
coordinator are numbered within an epoch and carried out in order. Sizes are checked before anything is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from edge_run.base.errors import ProtocolError
from edge_run.base.mesh import Document, Message
from edge_run.base.protocols import BatchToken

COMMANDS = ("decode", "rewind", "branch", "keep", "clear", "learn")
MOST_NUMBERS = 1 << 22
_FIELDS = 5  # of a token: id, position, sequence, whether its logits are wanted, how many branches follow


@dataclass(frozen=True, slots=True)
class Decode:
    """Run this batch."""

    batch: tuple[BatchToken, ...]


@dataclass(frozen=True, slots=True)
class Operate:
    """Change what the caches hold: `rewind` (sequence, position), `branch` (sequence, branches ...), `keep` (sequence,
    position, branch, branches ...), `clear` (), or `learn` (tokens, outputs), which maps a graph and clears.
    """  # noqa: D205

    what: str
    numbers: tuple[int, ...] = ()


Command: TypeAlias = "Decode | Operate"


def command_header(command: Command, epoch: int, number: int) -> Document:
    """Return the header of a command."""
    what = "decode" if isinstance(command, Decode) else command.what
    return {"kind": "command", "epoch": epoch, "number": number, "what": what}


def command_parts(command: Command) -> list[memoryview]:
    """Return the bulk of a command: its numbers."""
    numbers = _flat(command.batch) if isinstance(command, Decode) else list(command.numbers)
    return [memoryview(np.array(numbers, "<i4").tobytes())]


def read_command(message: Message, vocabulary: int) -> Command:
    """Return the command in `message`. Raises ProtocolError for what cannot be one."""
    what = message.header.get("what")
    if what not in COMMANDS or len(message.parts) != 1:
        raise ProtocolError(f"a command {what!r} of {len(message.parts)} parts from {message.node}: unknown here")
    part = message.parts[0]
    if len(part) % 4 or len(part) > 4 * MOST_NUMBERS:
        raise ProtocolError(f"a command of {len(part)} bytes from {message.node}: not whole numbers, or too many")
    numbers = np.frombuffer(part, "<i4").tolist()
    return Decode(_batch(numbers, vocabulary)) if what == "decode" else Operate(str(what), tuple(numbers))


def integer(header: Document, key: str) -> int:
    """Return an integer of a header. Raises ProtocolError where there is none."""
    value = header.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ProtocolError(f"a message says {key} {value!r}: needs an integer")
    return value


def _flat(batch: Sequence[BatchToken]) -> list[int]:
    numbers: list[int] = []
    for token in batch:
        numbers += (token.token, token.position, token.sequence, int(token.wants_logits), len(token.branches))
        numbers += token.branches
    return numbers


def _batch(numbers: Sequence[int], vocabulary: int) -> tuple[BatchToken, ...]:
    batch, at = [], 0
    while at < len(numbers):
        if len(numbers) - at < _FIELDS:
            raise ProtocolError("a batch ends in the middle of a token")
        token, position, sequence, wants, n_branches = numbers[at : at + _FIELDS]
        at += _FIELDS
        branches = tuple(numbers[at : at + n_branches]) if n_branches >= 0 else ()
        if not (0 <= token < vocabulary and position >= 0 and sequence >= 0 and len(branches) == n_branches):
            raise ProtocolError(f"a batch has token {token} at position {position} of sequence {sequence}: cannot be")
        batch.append(BatchToken(token, position, sequence, bool(wants), branches))
        at += n_branches
    if not batch:
        raise ProtocolError("a batch of no tokens")
    return tuple(batch)
