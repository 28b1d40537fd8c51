"""The messages of a run over the data link: headers, batches as integers, and the checks of both.

Every message names the epoch of its plan, and messages of other epochs are ignored. The coordinator numbers its
commands within an epoch, and devices carry them out in order. A command names the oldest batch in flight, so that
batches before it, which the coordinator gave up, are known to be over. Sizes are checked before anything is read, and
batches against the limits of the open context (`runtime/decoding/batch_limits.py`). Other checks are made where a value
is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from edge_run.base.errors import ConfigError, ContextFull, ProtocolError
from edge_run.base.fields import Document, shown
from edge_run.base.mesh import Message
from edge_run.base.protocols import BatchToken
from edge_run.runtime.decoding.batch_limits import Limits

OPERATIONS = {"rewind": 2, "branch": 2, "keep": 3, "clear": 0, "learn": 2}  # the numbers of each, branches aside
WITH_BRANCHES = ("branch", "keep")
_FIELDS = 5  # of a token: id, position, sequence, whether its logits are wanted, how many branches follow


@dataclass(frozen=True, slots=True)
class Decode:
    """Run this batch."""

    batch: tuple[BatchToken, ...]


@dataclass(frozen=True, slots=True)
class Operate:
    """Change what the caches hold.

    what: which change.
    numbers: of `rewind` sequence and position; of `branch` sequence and branches; of `keep` sequence, position, branch
        and branches; of `clear` none; of `learn`, which maps a graph and clears, tokens and outputs.
    """

    what: str
    numbers: tuple[int, ...] = ()


Command: TypeAlias = "Decode | Operate"


def command_header(
    command: Command, epoch: int, number: int, oldest: int | None = None, *, is_again: bool = False
) -> Document:
    """Return the header of a command.

    oldest: the number of the oldest batch in flight, None for no other than this.
    is_again: it was carried out before, under an earlier plan or until caches were emptied.
    """
    what = "decode" if isinstance(command, Decode) else command.what
    oldest = number if oldest is None else oldest
    return {"kind": "command", "epoch": epoch, "number": number, "oldest": oldest, "what": what, "again": is_again}


def command_parts(command: Command) -> list[memoryview]:
    """Return the bulk of a command: its numbers."""
    numbers = _flat(command.batch) if isinstance(command, Decode) else list(command.numbers)
    return [memoryview(np.array(numbers, "<i4").tobytes())]


def read_command(message: Message, limits: Limits) -> Command:
    """Return the command in `message`. Raises ProtocolError for what cannot be one in the context that has `limits`."""
    what = message.header.get("what")
    is_decode = what == "decode"
    if not isinstance(what, str) or not (is_decode or what in OPERATIONS) or len(message.parts) != 1:
        raise ProtocolError(f"a command {shown(what)} of {len(message.parts)} parts: unknown here", node=message.node)
    part = message.parts[0]
    most = limits.context_tokens * (_FIELDS + limits.sequences) if is_decode else _FIELDS + limits.sequences
    if part.nbytes % 4 or part.nbytes > 4 * most:
        raise ProtocolError(
            f"a command {what} of {part.nbytes} bytes: not whole numbers, or over {most}", node=message.node
        )
    numbers = np.frombuffer(part, "<i4").tolist()
    if not is_decode:
        return _operation(what, numbers)
    batch = _batch(numbers)
    try:
        limits.check_batch(batch)
    except (ConfigError, ContextFull) as error:
        raise ProtocolError(f"a command {what}: {error}", node=message.node) from error
    return Decode(batch)


def _flat(batch: Sequence[BatchToken]) -> list[int]:
    numbers: list[int] = []
    for token in batch:
        numbers += (token.token, token.position, token.sequence, int(token.wants_logits), len(token.branches))
        numbers += token.branches
    return numbers


def _operation(what: str, numbers: Sequence[int]) -> Operate:
    wanted = OPERATIONS[what]
    if len(numbers) < wanted or (len(numbers) > wanted and what not in WITH_BRANCHES):
        raise ProtocolError(f"a command {what} with {len(numbers)} numbers: needs {wanted}")
    return Operate(what, tuple(numbers))


def _batch(numbers: Sequence[int]) -> tuple[BatchToken, ...]:
    batch, at = [], 0
    while at < len(numbers):
        if len(numbers) - at < _FIELDS:
            raise ProtocolError("a batch ends in the middle of a token")
        token, position, sequence, wants, n_branches = numbers[at : at + _FIELDS]
        at += _FIELDS
        if not 0 <= n_branches <= len(numbers) - at or wants not in (0, 1):
            raise ProtocolError(f"a batch has a token with {n_branches} branches whose logits are wanted: {wants}")
        branches = tuple(numbers[at : at + n_branches])
        batch.append(BatchToken(token, position, sequence, bool(wants), branches))
        at += n_branches
    if not batch:
        raise ProtocolError("a batch of no tokens")
    return tuple(batch)
