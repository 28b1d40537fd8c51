"""Weights that go to another device: read directly, in large pieces, and copied in the order given.

While one piece is copied to the device, the readers fill the next ones; none of them stays in DRAM. A piece whose read
failed is read again when the upload goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edge_run.base.errors import EdgeRunError
from edge_run.base.files.identity import changed
from edge_run.base.interrupt import CHECK_S, go_on
from edge_run.base.units import MIB, round_down, round_up
from edge_run.tiers import _libc
from edge_run.tiers.readers import Readers, as_read_error
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
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._read: dict[int, EdgeRunError | None] = {}  # pieces that were read, or why not
        self._next = self._submitted = 0
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
            with self._lock:
                while number not in self._read:
                    self._changed.wait(CHECK_S)
                    self._check()
                error = self._read[number]
                if error is not None:
                    del self._read[number]
                    self._start(number)  # so that whoever tries again finds it read
                    raise error
            piece = self._pieces[number]
            self._put(piece, self._slot(number) + piece.file_offset % _libc.PAGE)
            self._next += 1
            del self._read[number]  # once it is counted: a piece that Ctrl-C comes after is put again
        self.close()

    def close(self) -> None:
        """Free the staging memory; no reader may be at work any more. Idempotent."""
        self._staging.close()

    def _slot(self, number: int) -> int:
        return self._staging.address + number % STAGED_PIECES * SLOT_BYTES

    def _submit(self) -> None:
        while self._submitted < min(len(self._pieces), self._next + STAGED_PIECES):
            self._start(self._submitted)
            self._submitted += 1

    def _start(self, number: int) -> None:
        self._readers.submit(lambda: self._fill(number), is_urgent=True)

    def _fill(self, number: int) -> int:
        error: EdgeRunError | None = None
        piece, n_bytes = self._pieces[number], 0
        start = round_down(piece.file_offset, _libc.PAGE)
        length = round_up(piece.file_offset + piece.length, _libc.PAGE) - start
        try:
            source, slot = self._sources[piece.shard], self._slot(number)
            n_bytes = read_patiently(lambda: source.read_into(slot, length, start))
            if start + n_bytes < piece.file_offset + piece.length:
                raise changed(source.path)
        except Exception as failure:  # whatever it is, the consumer must not wait for ever
            error = as_read_error(failure)
        with self._lock:
            self._read[number] = error
            self._changed.notify_all()
        return n_bytes
