"""The start of a model that lies in the page cache: on the kernel's own pages, which are copied in the background.

Fresh memory has to be cleared before a page can be copied there, which on a virtual machine takes several times as long
as the copy. So the first passes read the page cache itself, mapped where the weights belong. A mapped file is at the
mercy of whoever cuts it: a read past its new end ends the process, as it does with llama.cpp's mmap. So this does not
last: after the first pass a thread copies piece after piece into memory of this run, with what time the passes leave
it, and puts each into its place in a single step, while others may read there.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Sequence

from edge_run.base.config import CHUNK_BYTES
from edge_run.base.errors import EdgeRunError, system_errors
from edge_run.base.interrupt import JoinedThread, join_all
from edge_run.base.units import round_up
from edge_run.tiers import _libc
from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.readers import as_read_error
from edge_run.tiers.source import SourceFile, read_patiently

PATIENCE_S = 2.0  # after which copying begins, whether the first pass is over or not
PIECE_BYTES = 4 * CHUNK_BYTES  # copied at a time, into memory that this takes besides the weights
LOWEST_PRIORITY = 19


class CachedStart:
    """The chunks of a model that begin in the page cache. One thread maps, checks and closes.

    mapped: these chunks.
    copied_bytes: what of them was copied so far.
    """

    def __init__(self, address_space: AddressSpace, sources: Sequence[SourceFile], chunks: Iterable[int]) -> None:
        """Map those of `chunks` that the page cache holds, and begin to copy them.

        address_space: in which they have no memory yet.
        sources: the shards, by number, which know the page cache (`SourceFile.use_page_cache`).
        """
        self._address_space, self._sources = address_space, sources
        self._pieces = [piece for piece in self._cut(chunks) if self._map(piece)]
        self.mapped = frozenset(chunk for piece in self._pieces for chunk in piece)
        self.copied_bytes = self._n_copied = 0
        self._error: EdgeRunError | None = None
        self._is_closed, self._is_verified = False, not self._pieces
        self._has_begun, self._may_copy = False, threading.Event()
        if self._pieces:
            self._begin()

    def check(self) -> None:
        """Check before each batch that no file has changed since its pages were mapped, until all are copied.

        Raises ModelFileError, or TierReadError when a copy failed, which is tried again then.
        """
        if self._is_verified:
            return
        if self._has_begun:
            self._may_copy.set()
        self._has_begun = True
        if not self._thread.is_alive() and (error := self._error):
            self._begin()
            raise error
        self.check_read()

    def check_read(self) -> None:
        """Raise ModelFileError where a file has changed while passes may have read its pages."""
        if self._is_verified:
            return
        is_copied = not self._thread.is_alive() and not self._error  # asked first: a copy may be of what changes now
        for source in self._sources:
            source.check_unchanged()
        self._is_verified = is_copied

    def close(self) -> None:
        """Stop copying. Idempotent."""
        self._is_closed = True
        self._may_copy.set()
        if self._pieces:
            join_all([self._thread])

    def _begin(self) -> None:
        """Have a thread copy what is not copied yet. Raises TierReadError where none can be started."""
        thread = JoinedThread(self._copy_all, "edge-run-copier")
        with system_errors("copying weights from the page cache"):
            thread.start()
        self._thread = thread

    def _cut(self, chunks: Iterable[int]) -> list[range]:
        """Return the whole ones of `chunks` in pieces, each in a row."""
        space, pieces = self._address_space, list[range]()
        most = PIECE_BYTES // space.chunk_bytes
        for chunk in sorted(set(chunks) - space.unmovable):
            last = pieces[-1] if pieces else range(0)
            if last and len(last) < most and chunk == last.stop and space.is_followed_by(last[-1], chunk):
                pieces[-1] = range(last.start, chunk + 1)
            else:
                pieces.append(range(chunk, chunk + 1))
        return pieces

    def _map(self, piece: range) -> bool:
        place = self._address_space.place(piece[0])
        return self._sources[place.shard].map_cached(place.address, self._length(piece), place.file_offset)

    def _length(self, piece: range) -> int:
        return len(piece) * self._address_space.chunk_bytes

    def _copy_all(self) -> None:
        self._error = None  # not before: where no thread can be started, an earlier failure still counts
        with contextlib.suppress(OSError):  # no more than good manners
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        self._may_copy.wait(PATIENCE_S)
        mapping = 0
        try:
            mapping = _libc.map_anonymous(PIECE_BYTES + CHUNK_BYTES)
            room = round_up(mapping, CHUNK_BYTES)  # so that pages stay huge when they move
            _libc.advise_working_memory(room, PIECE_BYTES)
            for piece in self._pieces[self._n_copied :]:
                if self._is_closed:
                    return
                self._copy(piece, room)
                self._n_copied += 1
        except Exception as error:  # whatever it is, the next pass tells
            self._error = as_read_error(error)
        finally:
            if mapping:
                _libc.unmap(mapping, PIECE_BYTES + CHUNK_BYTES)

    def _copy(self, piece: range, room: int) -> None:
        place, length = self._address_space.place(piece[0]), self._length(piece)
        source = self._sources[place.shard]
        n_bytes = read_patiently(lambda: source.read_into(room, length, place.file_offset), lambda: self._is_closed)
        try:
            _libc.move_pages(room, place.address, length)  # who reads there meanwhile waits for the kernel
        except OSError:
            source.map(place.address, length, place.file_offset)  # the kernel may have left a hole
            raise
        self.copied_bytes += n_bytes
