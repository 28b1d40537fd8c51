"""Rows in a file while memory is short: carries out the decisions of `SpillStates` on the memory of a context.

Between passes, pieces that are complete are written and lose their memory. In a pass, an attention acquires the pieces
of its tensors; they come to frames that all pieces share, and those of the attentions after it are read ahead. So a
piece that is away has no memory but for the moment of its use, and a read of it elsewhere ends the process.
"""

from __future__ import annotations

import queue
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from edge_run.base.errors import EdgeRunError
from edge_run.base.units import round_down, round_up
from edge_run.tiers._libc import PAGE
from edge_run.tiers.address_space import AddressSpace, MappedSpan
from edge_run.tiers.kv.cells import CellTensor
from edge_run.tiers.kv.spill_file import SpillFile
from edge_run.tiers.kv.spill_shape import SpillShape
from edge_run.tiers.kv.spill_states import SpillStates
from edge_run.tiers.on_demand import OnDemand
from edge_run.tiers.readers import Readers, as_read_error
from edge_run.tiers.weights import READ_BYTES, Weights

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Use = tuple[int, ...]
Rows: TypeAlias = "npt.NDArray[np.bool_]"


class Spill:
    """The pieces of one context's rows, and the file for them. One thread uses it, between and in passes.

    numbers: of the tensors that have pieces, by address.
    room_bytes: what keys and values may take in memory.
    wait_s: how long passes waited for rows.
    """

    def __init__(
        self,
        shape: SpillShape,
        ranges: Sequence[tuple[int, int]],
        room_bytes: int,
        file: SpillFile,
        readers: Readers,
        check: Callable[[], None],
    ) -> None:
        """ranges: the memory, (address, bytes), that may come and go. check: may raise, to end a wait."""
        self._shape, self.room_bytes, self.file, self._readers, self._check = shape, room_bytes, file, readers, check
        self.wait_s = 0.0
        tensors, spans, offset = shape.cells.tensors, list[MappedSpan](), 0
        firsts, tensor_of, pieces = dict[int, int](), list[int](), list[range]()
        # In the order of memory: what follows in memory follows in the file, and may be read with it.
        for number in sorted({n for use in shape.uses for n in use}, key=lambda n: tensors[n].address):
            start, n_pieces = _place(tensors[number], ranges, shape.piece_bytes)
            if n_pieces:
                firsts[number] = len(pieces)
                tensor_of += [number] * n_pieces
                pieces += _rows(tensors[number], start, n_pieces, shape.piece_bytes)
                stop = start + n_pieces * shape.piece_bytes
                spans.append(MappedSpan(0, start, stop, start - offset))
                offset += stop - start
        self._firsts: Mapping[int, int] = firsts
        self.numbers = {tensors[number].address: number for number in firsts}
        self._tensor_of, self._rows_of = tensor_of, pieces
        self.states = SpillStates(pieces)
        self._space = AddressSpace(spans, shape.piece_bytes, is_sparse=True)
        frames = OnDemand(len(pieces), 0)
        run_pieces = max(1, READ_BYTES // shape.piece_bytes)
        self._weights = Weights(
            self._space, [file], readers, frames, run_chunks=run_pieces, check=check, is_constant=False
        )
        self._counts = [0] * len(tensors)  # of the pieces that are away, by tensor
        self._homeless: list[int] = []  # pieces that are not away any more, and have no memory of their own yet
        self._held: list[int] = []
        self._ahead: deque[tuple[Use, list[int]]] = deque()

    @property
    def n_rows(self) -> int:
        """The rows that count, on which nothing may be written."""
        return self.states.n_rows

    @property
    def away_bytes(self) -> int:
        """What is in the file and not in memory."""
        return self.states.n_away * self._shape.piece_bytes

    def cut(self, n_rows: int) -> None:
        """Only the first `n_rows` rows are left; `settle` follows before anything is written."""
        if n_rows < self.states.n_rows:
            self._homeless += self.states.cut(n_rows)

    def settle(self, n_rows: int, full_bytes: int) -> int:
        """Before a pass: `n_rows` rows are there, and with those to come all would take `full_bytes` in memory.

        Send away what has no room, as far as it is complete, and return what all take then. After a cut, have back what
        has room again. Raises what stops it, as TierReadError; then nothing is lost, and it may be called again.
        """
        is_cut = bool(self._homeless)
        self._bring_back()
        if not n_rows:
            self.file.empty()
        self.states.grow(n_rows)
        if is_cut:
            self._homeless += self.states.recall(self._least_away(full_bytes))
            self._bring_back()
        n_pieces, counts = self.states.n_away, [*self._counts]
        while n_pieces < self.states.n_complete and self._held_bytes(full_bytes, counts) > self.room_bytes:
            counts[self._tensor_of[self.states.order[n_pieces]]] += 1
            n_pieces += 1
        if n_pieces > self.states.n_away:
            self._send_away(n_pieces)
        return self._held_bytes(full_bytes, self._counts)

    def begin(self, use: Use, rows: Rows | None = None) -> None:
        """Have rows of the tensors `use` in memory until `end`: all, or those that `rows` names. Raises TierReadError.

        rows: whether each is needed; others may be away, and must not be read.
        """
        before: list[int] = []
        if self._ahead and self._ahead[0][0] == use:
            _, before = self._ahead.popleft()
        elif self._ahead:
            self._forget_ahead()  # a pass that goes another way
        pieces = self._pieces(use, rows)
        try:
            self.wait_s += self._weights.acquire(pieces)
            self._held += pieces
        finally:
            self._weights.release(before)

    def end(self, following: Sequence[Use] = (), likely: Mapping[Use, Rows | None] | None = None) -> None:
        """Let go of the rows in use.

        following: what is to be read ahead now, in order, if it is not yet. likely: which rows of it, as in `begin`.
        """
        held, self._held = self._held, []
        self._weights.release(held)
        for use in following[len(self._ahead) :]:
            pieces = self._pieces(use, likely.get(use) if likely else None)
            self._weights.hold(pieces)
            self._ahead.append((use, pieces))

    def abandon(self) -> None:
        """Let go of everything: a pass has failed, or goes another way."""
        self.end()
        self._forget_ahead()

    def _forget_ahead(self) -> None:
        while self._ahead:
            self._weights.release(self._ahead.popleft()[1])

    def _pieces(self, use: Use, rows: Rows | None = None) -> list[int]:
        """Return the pieces of the tensors `use` that are away, those with any of `rows`."""
        spans = ((self._firsts[number], self._counts[number]) for number in use)
        away = (piece for first, count in spans for piece in range(first, first + count))
        return [one for one in away if rows is None or rows[self._rows_of[one].start : self._rows_of[one].stop].any()]

    def _held_bytes(self, full_bytes: int, counts: Sequence[int]) -> int:
        return full_bytes - self._shape.piece_bytes * (sum(counts) - self._shape.at_once(counts))

    def _least_away(self, full_bytes: int) -> int:
        """Return how many of the pieces that are away need be, where all rows would take `full_bytes` in memory."""

        def fits(n_away: int) -> bool:
            counts = Counter(self._tensor_of[piece] for piece in self.states.order[:n_away])
            return self._held_bytes(full_bytes, [counts[n] for n in range(len(self._counts))]) <= self.room_bytes

        return bisect_left(range(self.states.n_away), True, key=fits)

    def _bring_back(self) -> None:
        """Give pieces that are not away any more memory of their own, and read those that have rows."""
        if self._homeless:
            self.abandon()
            while self._weights.n_frames:  # none lies under them then
                self._weights.shrink(self._weights.n_frames)
        while self._homeless:
            self._space.map(self._homeless[-1], None)
            self._counts[self._tensor_of[self._homeless.pop()]] -= 1
        self._grow()
        for piece in tuple(self.states.coming):
            self._check()
            place = self._space.place(piece)
            self.file.read_into(place.address, place.length, place.file_offset)
            self.states.came(piece)

    def _send_away(self, n_pieces: int) -> None:
        failure = self._write(self.states.save(n_pieces))
        gone = self.states.let_go(n_pieces)
        for piece in gone:
            self._counts[self._tensor_of[piece]] += 1
        self._grow()
        self._space.unmap(gone)
        if failure:
            raise failure

    def _write(self, pieces: Sequence[int]) -> EdgeRunError | None:
        """Write pieces, and wait for all of them: nothing that is written changes. Return what failed."""
        done: queue.SimpleQueue[tuple[int, EdgeRunError | None]] = queue.SimpleQueue()
        for piece in pieces:
            self._readers.submit(partial(self._write_one, piece, done), is_urgent=True)
        failure = None
        for _ in pieces:
            piece, error = done.get()
            self.states.saved(piece, is_written=error is None)
            failure = failure or error
        return failure

    def _write_one(self, piece: int, done: queue.SimpleQueue[tuple[int, EdgeRunError | None]]) -> int:
        place = self._space.place(piece)
        try:
            self.file.write(place.address, place.length, place.file_offset)
        except Exception as error:  # whatever it is, the consumer must not wait for ever
            done.put((piece, as_read_error(error)))
        else:
            done.put((piece, None))
        return 0

    def _grow(self) -> None:
        """Have as many frames as the attentions need that are in memory at once."""
        if n_lacking := max(0, self._shape.at_once(self._counts) - self._weights.n_frames):
            self._weights.grow(n_lacking)


def _place(tensor: CellTensor, ranges: Sequence[tuple[int, int]], piece_bytes: int) -> tuple[int, int]:
    """Return where the pieces of `tensor` begin, and how many there are: whole pages in memory that may come and go."""
    start, stop = tensor.address, tensor.address + tensor.row_bytes
    for address, length in ranges:
        low, high = max(round_up(start, PAGE), address), min(round_down(stop, PAGE), address + length)
        if low < high:
            return low, (high - low) // piece_bytes
    return start, 0


def _rows(tensor: CellTensor, start: int, n_pieces: int, piece_bytes: int) -> list[range]:
    """Return the rows that have any of their bytes in each piece."""
    borders = (start - tensor.address + i * piece_bytes for i in range(n_pieces))
    return [range(at // tensor.cell_bytes, -(-(at + piece_bytes) // tensor.cell_bytes)) for at in borders]
