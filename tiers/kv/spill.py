"""Rows in a file while memory is short: carries out the decisions of `SpillStates` on the memory of a context.

Between passes, pieces that are complete are written and lose their memory. In a pass, an attention acquires the pieces
of its tensors; they come to frames that all pieces share, and those of the attentions after it are read ahead. So a
piece that is away has no memory but for the moment of its use, and a read of it elsewhere ends the process.

A context of several streams has a text in each: each has states of its own, and an attention acquires the pieces of
those that the pass computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from edge_run.base.errors import EdgeRunError
from edge_run.base.units import round_down, round_up
from edge_run.tiers._libc import PAGE
from edge_run.tiers.address_space import AddressSpace, MappedSpan
from edge_run.tiers.kv.cells import CellTensor
from edge_run.tiers.kv.spill_file import SpillFile
from edge_run.tiers.kv.spill_shape import SpillShape
from edge_run.tiers.kv.spill_states import SpillStates
from edge_run.tiers.on_demand import OnDemand
from edge_run.tiers.readers import AwaitedJob, Readers
from edge_run.tiers.source import read_patiently
from edge_run.tiers.weights import READ_BYTES, WeightsOnDemand

if TYPE_CHECKING:
    from edge_run.tiers.kv.key_bounds import Choice

Use = tuple[int, ...]


class Spill:
    """The pieces of one context's rows, and the file for them. One thread uses it, between and in passes.

    texts: the states of each stream's pieces.
    numbers: of the tensors that have pieces, by address.
    room_bytes: what keys and values may take in memory.
    wait_s: how long passes waited for rows.

    It is over 200 lines because what is away, what has a frame and what the file has change together.
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
        tensors, n_streams = shape.cells.tensors, shape.cells.n_streams
        spans, offset = list[MappedSpan](), 0
        rows = [list[range]() for _ in range(n_streams)]
        self._pieces_of = [list[int]() for _ in range(n_streams)]  # of each text, in the order of its states
        self._parts: dict[tuple[int, int], range] = {}  # the pieces of a tensor in a stream
        self._owner: list[tuple[int, int]] = []  # of each piece: which part it is of
        # In the order of memory: what follows in memory follows in the file, and may be read with it.
        for number in sorted({n for use in shape.uses for n in use}, key=lambda n: tensors[n].address):
            for text in range(n_streams):
                part = tensors[number].part(text, n_streams)
                start, n_pieces = _place(part, ranges, shape.piece_bytes)
                if n_pieces:
                    pieces = range(len(self._owner), len(self._owner) + n_pieces)
                    self._parts[number, text] = pieces
                    self._owner += [(number, text)] * n_pieces
                    self._pieces_of[text] += pieces
                    rows[text] += _rows(part, start, n_pieces, shape.piece_bytes)
                    stop = start + n_pieces * shape.piece_bytes
                    spans.append(MappedSpan(0, start, stop, start - offset))
                    offset += stop - start
        self._local = {piece: i for pieces in self._pieces_of for i, piece in enumerate(pieces)}
        self.numbers = {tensors[number].address: number for number, _ in self._parts}
        self.texts = [SpillStates(of_text) for of_text in rows]
        self._reading = range(n_streams)  # the texts whose rows the pass reads
        self._space = AddressSpace(spans, shape.piece_bytes, is_sparse=True)
        frames = OnDemand(len(self._owner), 0)
        run_pieces = max(1, READ_BYTES // shape.piece_bytes)
        self._weights = WeightsOnDemand(
            self._space, [file], readers, frames, run_chunks=run_pieces, check=check, compares=False
        )
        self._counts = Counter[tuple[int, int]]()  # of the pieces that are away, by tensor and text
        self._homeless: list[int] = []  # pieces that are not away any more, and have no memory of their own yet
        self._is_cut = False
        self._in_file = [False] * n_streams  # whether the file has anything of a text
        self._writes: dict[int, AwaitedJob] = {}  # of pieces that go, until it is noted how they ended
        self._reads: dict[int, AwaitedJob] = {}  # of pieces that come back: their memory is the readers' as long
        self._held: list[int] = []
        self._ahead: deque[tuple[Use, list[int]]] = deque()

    @property
    def awaited_bytes(self) -> int:
        """How many bytes the readers have read for passes."""
        return self._weights.read_bytes

    @property
    def away_bytes(self) -> int:
        """What is in the file and not in memory."""
        return sum(states.n_away for states in self.texts) * self._shape.piece_bytes

    def cut(self, text: int, n_rows: int) -> None:
        """Only the first `n_rows` rows of a text are left; `settle` follows before anything is written."""
        if n_rows < self.texts[text].n_rows:
            self._is_cut = True
            self._homeless += (self._pieces_of[text][piece] for piece in self.texts[text].cut(n_rows))

    def settle(self, n_rows: Sequence[int], full_bytes: int) -> int:
        """Before a pass: each text has `n_rows` rows, and with those to come all would take `full_bytes` in memory.

        Send away what has no room, as far as it is complete, and return what all take then. After a cut, have back what
        has room again. Raises what stops it, as TierReadError and what `check` does; then nothing is lost, and it may
        be called again.
        """
        for piece in [piece for piece, write in self._writes.items() if write.has_ended]:
            self._note_write(piece)  # which a stop left, and a cut may have made void
        self._bring_back()
        self._empty_file(n_rows)
        for states, n in zip(self.texts, n_rows, strict=True):
            states.grow(n)
        if self._is_cut:
            self._recall(full_bytes)
            self._bring_back()
            self._is_cut = False
        targets = self._targets(full_bytes)
        if any(target > states.n_away for target, states in zip(targets, self.texts, strict=True)):
            self._send_away(targets)
        return self._held_bytes(full_bytes, self._counts)

    def text_cells(self, address: int) -> int:
        """Return how many cells a text has in the tensor at `address`."""
        cells = self._shape.cells
        return cells.tensors[self.numbers[address]].n_cells // cells.n_streams

    def read_of(self, texts: range) -> None:
        """The pass reads rows of `texts` from now on."""
        self._reading = texts

    def begin(self, use: Use, rows: Choice | None = None) -> None:
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

    def end(self, following: Sequence[Use] = (), likely: Mapping[Use, Choice | None] | None = None) -> None:
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

    def release(self) -> None:
        """Nothing is away any more: what was has memory of its own again, without its rows. It is not used any more.

        No reader may be at work.
        """
        self._space.renew()

    def _forget_ahead(self) -> None:
        while self._ahead:
            self._weights.release(self._ahead.popleft()[1])

    def _pieces(self, use: Use, rows: Choice | None = None) -> list[int]:
        """Return the pieces of the tensors `use` that are away, of the texts that are read, and have any of `rows`."""
        parts = [(number, text) for number in use for text in self._reading if (number, text) in self._parts]
        away = (piece for part in parts for piece in self._parts[part][: self._counts[part]])
        return [piece for piece in away if rows is None or self._has_any(piece, rows)]

    def _has_any(self, piece: int, rows: Choice) -> bool:
        own = self.texts[self._owner[piece][1]].pieces[self._local[piece]]
        return bool(rows[own.start : own.stop].any())

    def _held_bytes(self, full_bytes: int, counts: Mapping[tuple[int, int], int]) -> int:
        by_tensor = self._by_tensor(counts)
        return full_bytes - self._shape.piece_bytes * (sum(by_tensor) - self._shape.at_once(by_tensor))

    def _by_tensor(self, counts: Mapping[tuple[int, int], int]) -> list[int]:
        """Return how many pieces of each tensor are counted, of all texts."""
        by_tensor = [0] * len(self._shape.cells.tensors)
        for (number, _), count in counts.items():
            by_tensor[number] += count
        return by_tensor

    def _targets(self, full_bytes: int) -> list[int]:
        """Return how many pieces of each text are to be away: those whose rows are the oldest go first."""
        targets, counts = [states.n_away for states in self.texts], self._counts.copy()
        while self._held_bytes(full_bytes, counts) > self.room_bytes:
            able = [text for text, states in enumerate(self.texts) if targets[text] < states.n_complete]
            if not able:
                break
            text = min(able, key=lambda text: self.texts[text].stop_of(targets[text]))
            counts[self._owner_in(text, targets[text])] += 1
            targets[text] += 1
        return targets

    def _recall(self, full_bytes: int) -> None:
        """Have pieces come back that have room again, where all rows would take `full_bytes` in memory."""
        away = [(states.stop_of(i), text, i) for text, states in enumerate(self.texts) for i in range(states.n_away)]
        away.sort()

        def fits(n_away: int) -> bool:
            counts = Counter(self._owner_in(text, i) for _, text, i in away[:n_away])
            return self._held_bytes(full_bytes, counts) <= self.room_bytes

        kept = Counter(text for _, text, _ in away[: bisect_left(range(len(away)), True, key=fits)])
        for text, states in enumerate(self.texts):
            self._homeless += (self._pieces_of[text][piece] for piece in states.recall(kept[text]))

    def _owner_in(self, text: int, place: int) -> tuple[int, int]:
        """Return which part the piece is of that has a place in the order of a text."""
        return self._owner[self._pieces_of[text][self.texts[text].order[place]]]

    def _empty_file(self, n_rows: Sequence[int]) -> None:
        """Give back what the file has of texts without rows."""
        ended = [text for text, n in enumerate(n_rows) if self._in_file[text] and not n]
        if ended and not any(n_rows):
            self.file.empty()
        for text in ended:
            self._in_file[text] = False
            for (_, owner), pieces in self._parts.items():
                if owner == text and any(n_rows):
                    self.file.free(self._space.place(pieces[0]).file_offset, len(pieces) * self._shape.piece_bytes)

    def _bring_back(self) -> None:
        """Give pieces that are not away any more memory of their own, and read those that have rows."""
        self._await_reads()  # those that a stop left may write to their memory yet; what failed of them is read again
        if self._homeless:
            self.abandon()
            while self._weights.n_frames:  # none lies under them then
                self._weights.shrink(self._weights.n_frames)
        while self._homeless:
            self._space.map(self._homeless[-1], None)
            self._counts[self._owner[self._homeless.pop()]] -= 1
        self._grow()
        for text, states in enumerate(self.texts):
            for piece in states.coming:
                self._begin(self._reads, self._read, self._pieces_of[text][piece])
        if failure := self._await_reads():
            raise failure

    def _await_reads(self) -> EdgeRunError | None:
        """Wait until nothing is being read back any more, unless `check` raises; return what failed."""
        failure = None
        for number, read in list(self._reads.items()):
            error = read.wait(self._check)
            del self._reads[number]
            states, piece = self.texts[self._owner[number][1]], self._local[number]
            if error is None and piece in states.coming:  # its rows may have been cut meanwhile
                states.came(piece)
            failure = failure or error
        return failure

    def _read(self, piece: int) -> int:
        place = self._space.place(piece)
        read_patiently(lambda: self.file.read_into(place.address, place.length, place.file_offset))
        return 0  # no pass waits for it

    def _send_away(self, targets: Sequence[int]) -> None:
        """Have as many pieces of each text away as `targets` says, the first ones of its order."""
        self._await_writes()  # those that a stop left; what failed of them is written again
        for text, (states, target) in enumerate(zip(self.texts, targets, strict=True)):
            for piece in states.save(target):
                self._begin(self._writes, self._write, self._pieces_of[text][piece])
        failure = self._await_writes()
        gone = [
            self._pieces_of[text][piece]
            for text, (states, target) in enumerate(zip(self.texts, targets, strict=True))
            for piece in states.let_go(target)
        ]
        self._counts.update(self._owner[piece] for piece in gone)
        self._grow()
        self._space.unmap(gone)
        if failure:
            raise failure

    def _await_writes(self) -> EdgeRunError | None:
        """Wait until nothing is being written any more, unless `check` raises; return what failed."""
        failure = None
        for piece, write in list(self._writes.items()):
            error = write.wait(self._check)
            self._note_write(piece)
            failure = failure or error
        return failure

    def _note_write(self, piece: int) -> None:
        """Note the end of a write; what it wrote of rows that were cut meanwhile does not stay in the file."""
        text, write = self._owner[piece][1], self._writes.pop(piece)
        self._in_file[text] = True
        if not self.texts[text].saved(self._local[piece], is_written=write.error is None):
            self.file.free(self._space.place(piece).file_offset, self._shape.piece_bytes)

    def _write(self, piece: int) -> int:
        place = self._space.place(piece)
        self.file.write(place.address, place.length, place.file_offset)
        return 0

    def _begin(self, begun: dict[int, AwaitedJob], do: Callable[[int], int], piece: int) -> None:
        """Have a reader `do` what is to be done with `piece`."""
        begun[piece] = job = AwaitedJob(partial(do, piece))
        self._readers.submit(job, is_urgent=True)

    def _grow(self) -> None:
        """Have as many frames as the attentions need that are in memory at once."""
        by_tensor = self._by_tensor(self._counts)
        if n_lacking := max(0, self._shape.at_once(by_tensor) - self._weights.n_frames):
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
