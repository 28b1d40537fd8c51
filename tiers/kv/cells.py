"""The memory of a context's keys and values: where the cells of each layer lie, and how many of them are in use. Pure.

llama.cpp keeps each token of a context in a cell. A layer's keys are one row for each cell; its values are too, or,
without flash attention, one column. Cells are taken in order, the lowest free one first, and what no token was ever
written to is not needed: it reads as zeros, as llama.cpp leaves it. So memory that nothing was written to may be the
kernel's. Where each sequence has cells of its own, in a stream, all this holds for each stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from edge_run.base.units import MIB, round_down, round_up

LEAST_SPARSE_BYTES = 4 * MIB  # of a cache, to have memory only where something was written
NOTED_TOGETHER = 512  # cells, for whose notes memory is taken at once
PAGE_ROWS = 16  # whose keys have bounds together
BOUNDS_SHARE = 2 / PAGE_ROWS  # of the memory of keys: two for each page


@dataclass(frozen=True, slots=True)
class CellTensor:
    """The keys or the values of a layer, at `address`, for `n_cells` cells.

    n_rows: 1 where a cell's bytes lie together; else as many rows, in each of which a cell has `cell_bytes`.
    """

    address: int
    n_cells: int
    cell_bytes: int
    n_rows: int = 1

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self.n_cells * self.cell_bytes

    def part(self, number: int, n_parts: int) -> CellTensor:
        """Return one of `n_parts` equal parts, one after the other in memory."""
        offset = number * self.n_rows * self.row_bytes // n_parts
        return replace(self, address=self.address + offset, n_cells=self.n_cells // n_parts)

    def touched_bytes(self, n_cells: int, page_bytes: int) -> int:
        """Return what its first `n_cells` cells take at most, in whole pages."""
        used = min(n_cells, self.n_cells) * self.cell_bytes
        if not used:
            return 0
        whole = round_up(self.n_rows * self.row_bytes, page_bytes) + page_bytes
        return min(whole, self.n_rows * (round_up(used, page_bytes) + page_bytes))

    def unused(self, n_cells: int, page_bytes: int) -> list[tuple[int, int]]:
        """Return the whole pages, (address, bytes), that only cells from the first `n_cells` on lie in."""
        used, found = min(n_cells, self.n_cells) * self.cell_bytes, []
        for row in range(self.n_rows):
            start = round_up(self.address + row * self.row_bytes + used, page_bytes)
            stop = round_down(self.address + (row + 1) * self.row_bytes, page_bytes)
            if start < stop:
                found.append((start, stop - start))
        return found


@dataclass(frozen=True, slots=True)
class Cells:
    """All that a context keeps by cell.

    page_bytes: in what the kernel gives its memory.
    n_streams: how many sequences have cells of their own, an equal part of each tensor.
    noted_bytes: of each cell, what is noted of it in memory of ours, wherever the cell itself is.
    """

    tensors: Sequence[CellTensor]
    page_bytes: int
    n_streams: int = 1
    noted_bytes: int = 0
    _kinds: Sequence[tuple[CellTensor, int]] = field(init=False, repr=False, compare=False)  # and how many of each

    def __post_init__(self) -> None:
        kinds = Counter((tensor.n_cells, tensor.cell_bytes, tensor.n_rows) for tensor in self.tensors)
        object.__setattr__(self, "_kinds", [(CellTensor(0, *kind), count) for kind, count in kinds.items()])

    def bytes_for(self, n_cells: int) -> int:
        """Return what `n_cells` cells take at most, the first ones, of all streams together."""
        torn_bytes = (
            (min(self.n_streams, max(1, n_cells)) - 1) * 2 * self.page_bytes
        )  # at the ends of each other stream
        all_noted_bytes = round_up(n_cells, NOTED_TOGETHER) * self.noted_bytes
        return all_noted_bytes + sum(
            count * (kind.touched_bytes(n_cells, self.page_bytes) + torn_bytes) for kind, count in self._kinds
        )

    @property
    def streams(self) -> list[Cells]:
        """The cells of each stream."""
        return [
            Cells(
                [tensor.part(number, self.n_streams) for tensor in self.tensors],
                self.page_bytes,
                noted_bytes=self.noted_bytes,
            )
            for number in range(self.n_streams)
        ]


class CellCount:
    """How many cells a context has in use, at most.

    used: so many.
    top: up to which one anything is written.
    most_tokens: as many as there is room for.

    A token takes the lowest free cell, so a pass of n tokens in a context of m never writes beyond cell m + n, and the
    tokens of a single sequence never lie higher than their positions. Tokens that come beside those of other sequences,
    as guesses do, may, and so may those that were shifted: how much higher is kept in mind until the context is empty.
    """

    def __init__(self, most_tokens: int, verified_tokens: int = 0) -> None:
        """Count the cells of an empty context; at most `verified_tokens` guesses are verified in a pass."""
        self.most_tokens, self._most = most_tokens, most_tokens + verified_tokens
        self.used = self.top = 0
        self._least_position: int | None = None  # of tokens that came beside others, since there was one sequence
        self._rise = 0

    @property
    def sequence_tokens(self) -> int:
        """As many tokens as a sequence has room for."""
        return self.most_tokens

    @property
    def tops(self) -> list[int]:
        """Of each stream, up to which cell anything is written."""
        return [self.top]

    def expect(self, sequences: Iterable[int]) -> None:
        """The next pass has a token of each of `sequences`, which may be named more than once."""

    def note(self, lengths: Sequence[int]) -> None:
        """Sequences have so many tokens now, fewer than were counted; shared ones count for each of them."""
        if sum(length > 0 for length in lengths) > 1:
            self.lower(sum(lengths))
        else:
            self.cut(max(lengths))

    def has_room(self, n_tokens: int) -> bool:
        """Return whether `n_tokens` tokens more have room, those of all sequences together."""
        return self.used + n_tokens <= self._most

    def fork(self, position: int) -> None:
        """Tokens from `position` on come next, of several sequences, or of one beside others."""
        self._least_position = position if self._least_position is None else min(position, self._least_position)

    def add(self, n_tokens: int) -> None:
        """A pass of `n_tokens` tokens is computed."""
        self.top = min(self._most, max(self.top, self.used + n_tokens))
        self.used = min(self._most, self.used + n_tokens)
        if self._least_position is not None:
            self._rise = max(self._rise, self.used - self._least_position)

    def lower(self, n_tokens: int) -> None:
        """All sequences together have at most `n_tokens` tokens now."""
        self.used = min(self.used, n_tokens)

    def shift(self, n_tokens: int) -> None:
        """All tokens after some have lost `n_tokens` of their position, and stay in their cells."""
        self._rise += n_tokens

    def cut(self, n_tokens: int) -> None:
        """The context is one sequence of `n_tokens` tokens now."""
        self.used, self._least_position = n_tokens, None
        self._rise = self._rise if n_tokens else 0
        self.top = min(self.top, n_tokens + self._rise)


class StreamCount(CellCount):
    """The same where each sequence has a stream of its own: its tokens lie in the order of the text there."""

    def __init__(self, most_tokens: int, n_streams: int) -> None:
        """Count the cells of an empty context; each stream has room for an equal part of `most_tokens`."""
        super().__init__(most_tokens)
        self._lengths = [0] * n_streams
        self._expected = Counter[int]()

    @property
    def sequence_tokens(self) -> int:
        """As many tokens as a sequence has room for."""
        return self.most_tokens // len(self._lengths)

    @property
    def tops(self) -> list[int]:
        """Of each stream, up to which cell anything is written."""
        return list(self._lengths)

    def expect(self, sequences: Iterable[int]) -> None:
        """The next pass has a token of each of `sequences`, which may be named more than once."""
        self._expected = Counter(sequences)

    def add(self, n_tokens: int) -> None:
        """A pass of `n_tokens` tokens is computed, of the sequences that were expected."""
        assert n_tokens == self._expected.total()
        self.note([length + self._expected[number] for number, length in enumerate(self._lengths)])

    def note(self, lengths: Sequence[int]) -> None:
        """Sequences have so many tokens now."""
        self._lengths = list(lengths)
        self.used = self.top = sum(lengths)
