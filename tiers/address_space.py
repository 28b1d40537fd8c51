"""The address space of a model's weights: where each chunk of each file lives, and what memory is under it.

llama.cpp maps a stub of each file; the address space takes those mappings over. A chunk has no memory until it is
mapped here: until then its pages are PROT_NONE, so that a read of missing weights stops the process instead of giving
wrong text. Chunks of 2 MiB are aligned to their size, so that a frame moves as one huge page; smaller chunks lie at
multiples of their size in the file, where a packed file has its blocks. The first and the last chunk of a file may
stick out of the mapping. Only the part inside is ours, so such a chunk cannot change frames and is pinned. Frames are
moved only from whole chunks to whole chunks, whoever asks for the move.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edge_run.base.config import CHUNK_BYTES
from edge_run.base.errors import TierReadError, option
from edge_run.base.units import round_down, round_up
from edge_run.tiers import _libc
from edge_run.tiers.chunk_states import Load

PLACES_KEPT = 8192  # that were looked up last: a large mixture has millions of chunks


@dataclass(frozen=True, slots=True)
class MappedSpan:
    """A mapped part of one shard.

    shard: the number of the shard.
    start: the first address of the mapping.
    stop: the address after the last one.
    base: the address where the shard's byte 0 would be.
    """

    shard: int
    start: int
    stop: int
    base: int


class ChunkPlace(NamedTuple):
    """Where one chunk lies.

    address: its first byte in memory.
    length: its size in bytes.
    shard: the number of its shard.
    file_offset: its first byte in the file.
    is_whole: whether the chunk fills its frame, and so may change frames.
    """

    address: int
    length: int
    shard: int
    file_offset: int
    is_whole: bool


def clipped(spans: Sequence[MappedSpan], ranges: Iterable[tuple[int, int]]) -> list[MappedSpan]:
    """Return the spans that hold any of `ranges`, each cut down to the pages from the first range to the last.

    ranges: (address, length) pairs.
    """
    ranges, found = list(ranges), []
    for span in spans:
        inside = [(address, length) for address, length in ranges if span.start <= address < span.stop]
        if inside:
            start = round_down(min(address for address, _ in inside), _libc.PAGE)
            stop = round_up(max(address + length for address, length in inside), _libc.PAGE)
            found.append(MappedSpan(span.shard, max(span.start, start), min(span.stop, stop), span.base))
    return found


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (address, length) `ranges`, which are in order, with those joined that follow each other."""
    runs: list[tuple[int, int]] = []
    for address, length in ranges:
        if runs and sum(runs[-1]) == address:
            runs[-1] = runs[-1][0], runs[-1][1] + length
        else:
            runs.append((address, length))
    return runs


class MoveRefused(OSError):
    """A move would have taken a frame from, or put one under, memory that is not a whole chunk. Nothing was moved."""


class AddressSpace:
    """The address space of one model's weights, cut into numbered chunks. Thread-safe.

    spans: the mapped parts of all shards.
    staying: (address, length) of what never leaves memory.
    chunk_bytes: the size of a whole chunk.
    n_chunks: how many chunks there are.
    unmovable: the chunks that keep their memory: those that stick out of a mapping, or hold some of what stays.
    """

    def __init__(
        self,
        spans: Sequence[MappedSpan],
        chunk_bytes: int = CHUNK_BYTES,
        *,
        staying: Sequence[tuple[int, int]] = (),
        is_sparse: bool = False,
    ) -> None:
        """is_sparse: fresh memory is in small pages, so that a part of it may go without the rest."""
        self.spans, self.staying, self._is_sparse = tuple(spans), tuple(staying), is_sparse
        self.chunk_bytes = chunk_bytes
        self._first: list[int] = []
        self._grid: list[int] = []
        count = 0
        for span in self.spans:
            grid = self.border_before(span.start, span)
            self._first.append(count)
            self._grid.append(grid)
            count += -(-(span.stop - grid) // chunk_bytes)
        self.n_chunks = count
        self._starts = frozenset(self._first)
        self._places: dict[int, ChunkPlace] = {}
        ends = {
            chunk
            for first, last in zip(self._first, [*self._first[1:], count], strict=True)
            for chunk in (first, last - 1)
        }
        ragged = (chunk for chunk in ends if not self.place(chunk).is_whole)
        self.unmovable = frozenset(ragged).union(*(self.chunks_of(*place) for place in self.staying))

    def reserve(self) -> None:
        """Reserve the spans: drop what was mapped there, and leave the addresses unreadable."""
        for span in self.spans:
            _libc.map_anonymous(span.stop - span.start, _libc.PROT_NONE, at=span.start)

    def map_zeros(self) -> None:
        """Map zeros over all spans, for reading only; this takes no memory."""
        for span in self.spans:
            _libc.map_anonymous(span.stop - span.start, _libc.PROT_READ, at=span.start)
            _libc.advise_working_memory(span.start, span.stop - span.start)

    def renew(self) -> None:
        """Map fresh memory over all spans, whatever is there; it is taken as it is written."""
        for span in self.spans:
            _libc.map_anonymous(span.stop - span.start, _libc.PROT_READ_WRITE, at=span.start)
            _libc.advise_working_memory(span.start, span.stop - span.start, is_sparse=self._is_sparse)

    def border_before(self, address: int, span: MappedSpan) -> int:
        """Return where the chunk that holds `address`, inside `span`, would begin if the mapping had no ends."""
        origin = span.base if self.chunk_bytes < CHUNK_BYTES else 0
        return origin + round_down(address - origin, self.chunk_bytes)

    def expose(self, chunks: Iterable[int]) -> None:
        """Map zeros over `chunks`, which have no memory, for reading only; this takes none."""
        for address, length in self._runs(chunks):
            _libc.map_anonymous(length, _libc.PROT_READ, at=address)
            _libc.advise_working_memory(address, length)

    def unmap(self, chunks: Iterable[int]) -> None:
        """Give the memory of `chunks` back to the kernel; leave them unreadable, if it has room for more mappings."""
        for address, length in self._runs(chunks):
            try:
                _libc.map_anonymous(length, _libc.PROT_NONE, at=address)
            except OSError:
                _libc.drop_pages(address, length)

    def _runs(self, chunks: Iterable[int]) -> list[tuple[int, int]]:
        """Return (address, length) of `chunks`; neighbours are joined."""
        places = map(self.place, sorted(chunks))
        return joined((place.address, place.length) for place in places)

    def chunks_of(self, address: int, length: int) -> range:
        """Return the chunks that hold [address, address + length). Raises ValueError outside all spans."""
        for span, first, grid in zip(self.spans, self._first, self._grid, strict=True):
            if span.start <= address and address + length <= span.stop:
                low = (address - grid) // self.chunk_bytes
                high = (address + max(length, 1) - 1 - grid) // self.chunk_bytes
                return range(first + low, first + high + 1)
        raise ValueError(f"address {address:#x} (+{length}) is in no mapping of the model")

    def holding(self, ranges: Iterable[tuple[int, int]]) -> list[int]:
        """Return the chunks that hold any of the (address, length) `ranges`, and all that cannot move."""
        return sorted(self.unmovable.union(*(self.chunks_of(*place) for place in ranges)))

    def span_of(self, address: int) -> MappedSpan:
        """Return the span that holds `address`. Raises ValueError outside all spans."""
        for span in self.spans:
            if span.start <= address < span.stop:
                return span
        raise ValueError(f"address {address:#x} is in no mapping of the model")

    def place(self, chunk: int) -> ChunkPlace:
        """Return where `chunk` lies."""
        place = self._places.get(chunk)
        if place is None:
            if len(self._places) >= PLACES_KEPT:
                self._places.clear()
            place = self._places[chunk] = self._locate(chunk)
        return place

    def is_followed_by(self, chunk: int, other: int) -> bool:
        """Return whether `other` begins where `chunk` ends, in memory and therefore in the file."""
        if other == chunk + 1 and other not in self._starts:
            return True
        place, next_place = self.place(chunk), self.place(other)
        return place.shard == next_place.shard and place.address + place.length == next_place.address

    def total_bytes(self, chunks: Collection[int]) -> int:
        """Return the total size of `chunks`."""
        missing = sum(self.chunk_bytes - self.place(chunk).length for chunk in self.unmovable.intersection(chunks))
        return len(chunks) * self.chunk_bytes - missing

    def map(self, chunk: int, source: int | None, count: int = 1) -> None:
        """Give `chunk` memory: the frame of chunk `source`, or fresh memory where `source` is None or negative.

        count: how many chunks in a row are mapped, from `chunk` on; their frames come from as many chunks in a row,
            from `source` on.

        Raises OSError when the kernel refuses; then none of the chunks has memory, and the content of the sources is
        lost. Raises MoveRefused, and does nothing, unless source and target are whole chunks in a row.
        """
        if source == chunk:
            return
        if source is None or source < 0:
            self._map_fresh(chunk, count)
            return
        old, new, length = self._whole(source, count), self._whole(chunk, count), count * self.chunk_bytes
        try:
            if count == 1 or not _move_together(old, new, length):
                for offset in range(0, length, self.chunk_bytes):
                    _move(old + offset, new + offset, self.chunk_bytes)
        except OSError:
            _libc.map_anonymous(length, _libc.PROT_NONE, at=new)  # the kernel may have left a hole
            _libc.map_anonymous(length, _libc.PROT_NONE, at=old)  # those that had not moved yet have their frames still
            raise

    def _map_fresh(self, chunk: int, count: int) -> None:
        address, last = self.place(chunk).address, self.place(chunk + count - 1)
        length = last.address + last.length - address
        try:
            _libc.map_anonymous(length, _libc.PROT_READ_WRITE, at=address)
        except OSError:
            _libc.map_anonymous(length, _libc.PROT_NONE, at=address)  # the kernel may have left a hole
            raise
        _libc.advise_working_memory(address, length, is_sparse=self._is_sparse)

    def _whole(self, chunk: int, count: int) -> int:
        """Return the first address of `count` whole chunks in a row, from `chunk` on; raise MoveRefused for others.

        The kernel would move, or drop, whatever else lies there.
        """
        last = chunk + count - 1
        if chunk >= 0 and last < self.n_chunks and self.unmovable.isdisjoint(range(chunk, last + 1)):
            address = self.place(chunk).address
            if count == 1 or self.place(last).address - address == (count - 1) * self.chunk_bytes:
                return address
        raise MoveRefused(errno.EFAULT, f"chunks {chunk} to {last} are not whole chunks of the model in a row")

    def _locate(self, chunk: int) -> ChunkPlace:
        index = bisect_right(self._first, chunk) - 1
        span = self.spans[index]
        low = self._grid[index] + (chunk - self._first[index]) * self.chunk_bytes
        start, stop = max(low, span.start), min(low + self.chunk_bytes, span.stop)
        is_whole = stop - start == self.chunk_bytes
        return ChunkPlace(start, stop - start, span.shard, start - span.base, is_whole)


class FrameMoves:
    """The moves of frames under the chunks that are to be read. Not thread-safe: the caller locks.

    They are made in the order in which the frames were handed out, whichever read comes first, because a frame may be
    handed on to the next chunk before it has moved to this one.
    """

    def __init__(self, address_space: AddressSpace) -> None:
        self._address_space = address_space
        self._asked: deque[Load] = deque()
        self._n_asked = self._n_made = 0
        self._refused: dict[int, OSError] = {}  # by chunk

    def ask(self, run: Sequence[Load]) -> int:
        """Note that the frames of `run` are to move, after all others; return how many moves those and it make."""
        self._asked.extend(run)
        self._n_asked += len(run)
        return self._n_asked

    def make(self, n_moves: int | None = None) -> None:
        """Make the first `n_moves` moves since the start, or all, as far as they are not made yet.

        One that the kernel refuses is noted for its chunks.
        """
        n_moves = self._n_asked if n_moves is None else n_moves
        while self._n_made < n_moves:
            run = [self._asked.popleft()]
            while self._asked and self._goes_with(self._asked[0], run):
                run.append(self._asked.popleft())
            self._n_made += len(run)
            try:
                self._address_space.map(run[0].chunk, run[0].source, len(run))
            except OSError as error:
                self._refused.update((load.chunk, error) for load in run)

    def check(self, run: Sequence[Load]) -> None:
        """Raise TierReadError where a move for `run` was refused."""
        for load in run if self._refused else ():
            if error := self._refused.get(load.chunk):
                advice = "please report this"
                if not isinstance(error, MoveRefused):
                    advice = f"raise vm.max_map_count or lower {option('memory')}"
                raise TierReadError(f"moving page frames failed ({error}); {advice}") from error

    def forget_refused(self, chunk: int) -> bool:
        """Forget that the move for `chunk` was refused, which lost its frame; return whether it was."""
        return self._refused.pop(chunk, None) is not None

    def _goes_with(self, load: Load, run: Sequence[Load]) -> bool:
        """Return whether `load` can be moved in one call with `run`: from chunks in a row to chunks in a row."""
        chunk, source, _ = load
        last_chunk, last_source, _ = run[-1]
        if source is None or last_source is None or not self._address_space.is_followed_by(last_chunk, chunk):
            return False
        if source < 0 or last_source < 0:
            return source < 0 and last_source < 0
        first_chunk, first_source, _ = run[0]
        is_apart = first_source is not None and abs(first_source - first_chunk) > len(run)
        return is_apart and self._address_space.is_followed_by(last_source, source)


def _move(old: int, new: int, length: int) -> None:
    """Move the frames at `old` to `new`."""
    try:
        _libc.move_pages(old, new, length)
    finally:
        # Replaced at once, so that it merges with its neighbours (vm.max_map_count) and stays unreadable.
        _libc.map_anonymous(length, _libc.PROT_NONE, at=old)


def _move_together(old: int, new: int, length: int) -> bool:
    """Move all frames at `old` in one call; return False where the kernel refuses.

    It refuses where the frames lie in more than one mapping.
    """
    try:
        _libc.move_pages(old, new, length)
    except OSError:
        _libc.map_anonymous(length, _libc.PROT_NONE, at=new)
        return False
    _libc.map_anonymous(length, _libc.PROT_NONE, at=old)
    return True
