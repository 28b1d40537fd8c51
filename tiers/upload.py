"""Weights that go to another device: read directly, in large pieces, and copied in the order given.

While one piece is copied to the device, the readers fill the next ones; none of them stays in DRAM. A piece whose read
failed is read again when the upload goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from edge_run.base.files.identity import changed
from edge_run.base.interrupt import go_on
from edge_run.base.units import MIB, round_down, round_up
from edge_run.tiers import _libc
from edge_run.tiers.readers import AwaitedJob, Readers
from edge_run.tiers.source import SourceFile, read_patiently

PIECE_BYTES = 4 * MIB
STAGED_PIECES = 4
SLOT_BYTES = PIECE_BYTES + 2 * _libc.PAGE
STAGING_BYTES = STAGED_PIECES * SLOT_BYTES


class Staging:
    """`STAGING_BYTES` of ordinary memory, page-aligned, that files can be read into. address: its first byte."""

    def __init__(self) -> None:
        self.address = _libc.map_anonymous(STAGING_BYTES)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        if self.address:
            _libc.unmap(self.address, STAGING_BYTES)
            self.address = 0


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of one tensor.

    tensor: the handle of the tensor.
    shard: the number of its shard.
    file_offset: where the part lies in the shard.
    length: its size in bytes.
    offset: where the part lies in the tensor.
    """

    tensor: int
    shard: int
    file_offset: int
    length: int
    offset: int = 0


def cut_into_pieces(extents: Sequence[Extent], piece_bytes: int = PIECE_BYTES) -> list[Extent]:
    """Return `extents` cut into pieces of at most `piece_bytes`, in file order."""
    return [
        replace(
            extent,
            file_offset=extent.file_offset + done,
            length=min(piece_bytes, extent.length - done),
            offset=extent.offset + done,
        )
        for extent in sorted(extents, key=lambda extent: (extent.shard, extent.file_offset))
        for done in range(0, extent.length, piece_bytes)
    ]


class Upload:
    """An upload, which begins to read when it is made. One consumer thread calls `finish`.

    put: copies a piece from an address in memory to the device.
    staging: the memory that pieces are read into, which the upload closes.
    check: runs while the consumer waits, and may raise to stop.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        sources: Sequence[SourceFile],
        readers: Readers,
        put: Callable[[Extent, int], None],
        staging: Staging | None = None,
        check: Callable[[], None] = go_on,
    ) -> None:
        self._check = check
        self._pieces = cut_into_pieces(extents)
        self._sources, self._readers, self._put = sources, readers, put
        self._reads: dict[int, AwaitedJob] = {}  # of the next pieces
        self._next = 0
        self._staging = staging or Staging()
        self._submit()

    @property
    def is_done(self) -> bool:
        """Whether all pieces are on the device."""
        return self._next == len(self._pieces)

    def finish(self) -> None:
        """Copy all pieces to the device; after a stop, another call goes on.

        Raises TierReadError or ModelFileError when a piece cannot be read.
        """
        while not self.is_done:
            self._submit()
            number = self._next
            if error := self._reads[number].wait(self._check):
                self._start(number)  # so that whoever tries again finds it read
                raise error
            piece = self._pieces[number]
            self._put(piece, self._slot(number) + piece.file_offset % _libc.PAGE)
            self._next += 1  # before its read is forgotten: a piece that Ctrl-C comes after is put again
            del self._reads[number]
        self.close()

    def close(self) -> None:
        """Free the staging memory; no reader may be at work any more. Idempotent."""
        self._staging.close()

    def _slot(self, number: int) -> int:
        return self._staging.address + number % STAGED_PIECES * SLOT_BYTES

    def _submit(self) -> None:
        for number in range(self._next, min(len(self._pieces), self._next + STAGED_PIECES)):
            if number not in self._reads:
                self._start(number)

    def _start(self, number: int) -> None:
        self._reads[number] = read = AwaitedJob(partial(self._fill, number))
        self._readers.submit(read, is_urgent=True)

    def _fill(self, number: int) -> int:
        piece = self._pieces[number]
        start = round_down(piece.file_offset, _libc.PAGE)
        length = round_up(piece.file_offset + piece.length, _libc.PAGE) - start
        source, slot = self._sources[piece.shard], self._slot(number)
        n_bytes = read_patiently(lambda: source.read_into(slot, length, start))
        if start + n_bytes < piece.file_offset + piece.length:
            raise changed(source.path)
        return n_bytes
