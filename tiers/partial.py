"""A model of which only some pieces are present: sparse files, and a journal of the pieces that are complete.

A piece is written, the files are synced, the journal records the piece, and the journal is synced. So the journal is
true even if the process or the device stops between two of these steps. A record that is cut off does not count, nor
does anything after it. A piece that is given up is removed from the journal first, then from the disk. Models are read
through a `PartialSource`, which refuses missing pieces: a hole is never taken for zeros.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from edge_run.base.errors import ModelFileError, TierReadError, option, reason_of
from edge_run.base.files.identity import FileIdentity
from edge_run.base.files.whole import sync
from edge_run.tiers import _libc
from edge_run.tiers.pieces import Pieces, read_at
from edge_run.tiers.source import SourceFile

JOURNAL = "journal"
_RECORD = struct.Struct("<II")  # the piece's number, doubled, one more where it is good; a check of that
_MAGIC = b"edge-run pieces 1\n"


class PartialModel:
    """Some pieces of one model, in a folder of its own. One thread changes it; any thread may ask what is present."""

    def __init__(self, folder: Path, model: str, pieces: Pieces) -> None:
        """Open the pieces in `folder` of the model with the hash `model`, or begin anew. Raises TierReadError."""
        self.folder, self.pieces = folder, pieces
        self.paths = [folder / name for name in _names(len(pieces.sizes))]
        self._seed = zlib.crc32(model.encode())
        self._good: set[int] = set()
        self._fresh: list[int] = []
        self._head = _MAGIC + model.encode() + b"\n"
        self._files: list[int] = []
        with _writing(folder), contextlib.ExitStack() as undo:
            undo.callback(self.close)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._open()
            undo.pop_all()

    def _open(self) -> None:
        journal = self.folder / JOURNAL
        if not all(path.exists() and path.stat().st_size == size for path, size in self._shards()):
            journal.unlink(missing_ok=True)
            sync(self.folder)
        for path, size in self._shards():
            self._files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            os.ftruncate(self._files[-1], size)
        self._journal = os.open(journal, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._files.append(self._journal)
        self._end = self._read_journal()
        os.ftruncate(self._journal, self._end)
        if not self._end:
            _write_all(self._journal, self._head, 0)
            self._end = len(self._head)
        for file in self._files:
            os.fdatasync(file)
        sync(self.folder)

    def _shards(self) -> Iterable[tuple[Path, int]]:
        return zip(self.paths, self.pieces.sizes, strict=True)

    def _read_journal(self) -> int:
        """Read the journal; return the offset where its valid records end."""
        content = read_at(self._journal, os.fstat(self._journal).st_size, 0)
        if not content.startswith(self._head):
            return 0
        end = len(self._head)
        while end + _RECORD.size <= len(content):
            entry, check = _RECORD.unpack_from(content, end)
            if check != self._check(entry) or entry >> 1 >= self.pieces.count:
                break
            (self._good.add if entry & 1 else self._good.discard)(entry >> 1)
            end += _RECORD.size
        return end

    def missing(self, pieces: Iterable[int]) -> list[int]:
        """Return those of `pieces` that are missing."""
        return [piece for piece in pieces if piece not in self._good]

    def beyond(self, pieces: Collection[int]) -> list[int]:
        """Return the present pieces that are not among `pieces`."""
        return sorted(self._good.difference(pieces))

    def write(self, piece: int, data: bytes | memoryview) -> None:
        """Write `data`, which was verified, as `piece`, which is present after `sync`. Raises TierReadError."""
        place = self.pieces.place(piece)
        assert len(data) == place.length, "a piece of another length"
        with _writing(self.folder):
            _write_all(self._files[place.shard], data, place.offset)
        self._fresh.append(piece)

    def sync(self) -> None:
        """Sync the written pieces to the disk and make them present. Raises TierReadError; then they stay missing."""
        fresh, self._fresh = self._fresh, []
        if not fresh:
            return
        with _writing(self.folder):
            for shard in {self.pieces.place(piece).shard for piece in fresh}:
                os.fdatasync(self._files[shard])
                _libc.forget_pages(self._files[shard])
            self._note(fresh, is_good=True)
        self._good.update(fresh)

    def give_up(self, pieces: Iterable[int]) -> None:
        """Remove `pieces`, and free their disk space.

        Raises TierReadError; where files cannot have holes, nothing is removed then.
        """
        gone = sorted(self._good.intersection(pieces))
        if not gone:
            return
        self._check_holes()
        self._good.difference_update(gone)
        with _writing(self.folder):
            self._note(gone, is_good=False)
            for piece in gone:
                place = self.pieces.place(piece)
                _libc.punch_hole(self._files[place.shard], place.offset, place.length)

    def free_missing(self) -> None:
        """Free the disk space of missing pieces: a process that was killed may have written some, and not synced them.

        Where files cannot have holes, they keep it. Raises TierReadError where what was written cannot be synced.
        """
        self.sync()
        with contextlib.suppress(OSError):
            if os.fstat(self._journal).st_size > self._end:  # it says more than counts, after a sync that failed
                os.ftruncate(self._journal, self._end)
                os.fdatasync(self._journal)
            for shard, size in enumerate(self.pieces.sizes):
                end = 0
                while end < size and (start := self._next_data(shard, end)) < size:
                    end = os.lseek(self._files[shard], start, os.SEEK_HOLE)
                    for piece in self.missing(self.pieces.covering(shard, start, end - start)):
                        place = self.pieces.place(piece)
                        _libc.punch_hole(self._files[shard], place.offset, place.length)

    def _next_data(self, shard: int, offset: int) -> int:
        """Return from where on a shard has anything on the disk, not before `offset`; its size where nowhere."""
        try:
            return os.lseek(self._files[shard], offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return self.pieces.sizes[shard]

    def _check_holes(self) -> None:
        """Raise TierReadError unless the file system can free a part of a file, which is tried behind the journal."""
        try:
            _libc.punch_hole(self._journal, self._end, _libc.PAGE)
        except OSError as error:
            raise TierReadError(
                f"{self.folder}: no part of a file can be freed there ({reason_of(error)}); choose a folder on another "
                f"file system ({option('cache_folder')})",
                errno=error.errno,
            ) from error

    def check(self, shard: int, offset: int, length: int) -> None:
        """Raise ModelFileError unless `length` bytes at `offset` of `shard`, up to its end, are present."""
        missing = self.missing(self.pieces.covering(shard, offset, length))
        if missing:
            raise ModelFileError(
                f"{self.paths[shard]}: {len(missing)} pieces of {length} bytes at {offset} were not fetched; "
                "please report this",
            )

    def close(self) -> None:
        """Close the files. Pieces written and not synced are missing when the folder is opened again. Idempotent."""
        files, self._files = self._files, []
        for file in files:
            os.close(file)

    def _note(self, pieces: Collection[int], *, is_good: bool) -> None:
        """Append records to the journal, over a part of a record that an earlier failure left."""
        records = bytearray()
        for piece in pieces:
            entry = 2 * piece + is_good
            records += _RECORD.pack(entry, self._check(entry))
        _write_all(self._journal, records, self._end)
        os.fdatasync(self._journal)
        self._end += len(records)

    def _check(self, entry: int) -> int:
        return zlib.crc32(entry.to_bytes(4, "little"), self._seed)


class PartialSource(SourceFile):
    """A shard of a `PartialModel`, open for reading its present pieces."""

    def __init__(self, model: PartialModel, shard: int) -> None:
        self._model, self._shard = model, shard
        super().__init__(model.paths[shard])

    def _identify(self) -> tuple[FileIdentity, int]:
        """Leave out the times of change, which are those of the piece written last."""
        identity, _ = super()._identify()
        return replace(identity, modified_ns=0), 0

    def read_pieces(self, pieces: Sequence[tuple[int, int]], offset: int) -> int:
        """Fill memory as any source does. Also raises ModelFileError for missing pieces."""
        self._model.check(self._shard, offset, sum(length for _, length in pieces))
        return super().read_pieces(pieces, offset)


def _names(count: int) -> list[str]:
    """Return the file names of a model's shards, as llama.cpp wants them."""
    if count == 1:
        return ["model.gguf"]
    return [f"model-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def _write_all(descriptor: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, memoryview(data)[written:], offset + written)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raise TierReadError where the system refuses what is done in this block."""
    try:
        yield
    except OSError as error:
        raise TierReadError(
            f"{folder}: cannot keep fetched weights there ({reason_of(error)}); free space on its disk, or "
            f"choose another folder with {option('cache_folder')}",
            errno=error.errno,
        ) from error
