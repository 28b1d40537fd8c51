"""Which tokens the rows of a context are of, and which passes computed them: a state machine without I/O.

The last bits of a row depend on how many tokens its pass had. So rows are known by their tokens and by the passes that
computed them, each as its first position and the number of its tokens; of a pass that was cut the first rows stay.
Reading a prompt in one go has the passes `reading` gives. Where logits do not depend on the width of passes, passes do
not matter.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from edge_run.tiers.kv.layout import BLOCK_ROWS

NAME_BYTES = 16


class RowPass(NamedTuple):
    """A pass over `width` tokens from position `start` on."""

    start: int
    width: int


def reading(n_tokens: int, width: int) -> list[RowPass]:
    """Return the passes of a prompt of `n_tokens` tokens that is read in one go, at most `width` tokens in each."""
    return [RowPass(start, min(width, n_tokens - start)) for start in range(0, n_tokens, width)]


class RowRecord:
    """The rows of one context, of one sequence whose tokens lie in the cells of their positions.

    tokens: of the rows that are known. passes: those that computed them; None where they do not matter. Rows that came
    in another way are not known, nor are those after them, until the context is cut before them.
    """

    def __init__(self, *, has_passes: bool) -> None:
        self.tokens: list[int] = []
        self.passes: list[RowPass] | None = [] if has_passes else None
        self._end = 0  # of all rows, known or not

    @property
    def is_whole(self) -> bool:
        """Whether all rows are known."""
        return self._end == len(self.tokens)

    def ran(self, start: int, tokens: Sequence[int]) -> None:
        """A pass has computed rows for `tokens`, from position `start` on."""
        if start == self._end == len(self.tokens):
            self.tokens.extend(tokens)
            if self.passes is not None:
                self.passes.append(RowPass(start, len(tokens)))
        self._end = start + len(tokens)

    def restore(self, tokens: Sequence[int], passes: Sequence[RowPass]) -> None:
        """The rows are those of `tokens`, that `passes` computed once."""
        self.tokens, self._end = list(tokens), len(tokens)
        if self.passes is not None:
            self.passes = list(passes)

    def cut(self, position: int) -> None:
        """The rows from `position` on are gone."""
        self._end = min(self._end, position)
        del self.tokens[position:]
        if self.passes is not None:
            del self.passes[bisect_left(self.passes, (position, 0)) :]

    def lose(self, position: int) -> None:
        """What the rows from `position` on are is not known."""
        end = max(self._end, position + 1)
        self.cut(position)
        self._end = end

    def check(self) -> None:
        """Raise AssertionError where tokens and passes do not belong together."""
        assert len(self.tokens) <= self._end
        if self.passes is None:
            return
        starts = [one.start for one in self.passes]
        assert starts == sorted(set(starts))
        assert (starts[:1] == [0]) == bool(self.tokens)
        ends = [*starts[1:], len(self.tokens)]
        assert all(start < end <= start + one.width for one, start, end in zip(self.passes, starts, ends, strict=False))


def last_stop(passes: Sequence[RowPass] | None, most: int) -> int:
    """Return the last position, `most` at most, before which rows are of whole passes or of the first rows of cut ones.

    To go on from there is to go on as the passes did. Without passes every position is one.
    """
    if passes is None:
        return most
    number = bisect_right(passes, (most, 1 << 62)) - 1
    if number < 0:
        return 0
    start, width = passes[number]
    return start + width if number + 1 == len(passes) and start + width <= most else start


def first_without_room(passes: Sequence[RowPass], context_tokens: int, width: int) -> int:
    """Return before which position all of `passes` can run in a context of so many tokens, `width` in a pass at most.

    A pass takes cells for all of its tokens, also for those that were cut later.
    """
    bad = (one.start for one in passes if one.start + one.width > context_tokens or one.width > width)
    return next(bad, context_tokens)


def block_names(root: bytes, tokens: Sequence[int], passes: Sequence[RowPass] | None) -> list[bytes]:
    """Return the names of the complete blocks of `tokens`: each says all that came before it.

    root: of all blocks of one model under one numerics key. So names make a tree of prefixes.
    """
    names, name = [], root
    for start in range(0, len(tokens) - BLOCK_ROWS + 1, BLOCK_ROWS):
        name = part_name(name, tokens, passes, start, start + BLOCK_ROWS)
        names.append(name)
    return names


def part_name(parent: bytes, tokens: Sequence[int], passes: Sequence[RowPass] | None, start: int, stop: int) -> bytes:
    """Return the name of the rows `start` to `stop` that come after those that are named `parent`."""
    numbers = list(tokens[start:stop])
    if passes is not None:
        first = max(0, bisect_right(passes, (start, 1 << 62)) - 1)
        for one in passes[first : bisect_left(passes, (stop, 0))]:
            numbers += [one.start, one.width]
    packed = struct.pack(f"<{len(numbers) + 1}q", stop - start, *numbers)
    return hashlib.blake2b(parent + packed, digest_size=NAME_BYTES).digest()
