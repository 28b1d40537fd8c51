"""A model file as a source of bytes, some of which are read packed from another file and unpacked in the reader."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_run.base.errors import PackedFileError
from edge_run.base.extras import PACK, need
from edge_run.base.units import round_down, round_up
from edge_run.tiers import _libc
from edge_run.tiers.packed_file import PackedFile, packed_anew
from edge_run.tiers.packed_index import READ_BYTES, read_table
from edge_run.tiers.readers import ThreadMemory
from edge_run.tiers.source import SourceFile

Bytes = npt.NDArray[np.uint8]

_NUMBERS, _PLACE = np.dtype("<u2"), np.uint16(256)  # of the last byte in a number
_BUFFER_BYTES = READ_BYTES + 2 * _libc.PAGE  # that a thread reads into: blocks begin and end within pages

Frames = tuple[memoryview, memoryview]  # the two zstd frames of a block, of which the second may be empty


def set_apart(block: bytes, number_bytes: int) -> tuple[bytes, bytes]:
    """Return the last bytes of all numbers in `block`, and their first bytes; an odd byte at the end is a first byte.

    number_bytes: the size of a number: 2, or 1, where the result is the block itself and nothing.
    """
    return (block[1::2], block[::2]) if number_bytes == 2 else (block, b"")


def set_together(last: bytes, first: bytes, target: Bytes) -> None:
    """Undo `set_apart`, into `target`."""
    if not first:
        target[:] = np.frombuffer(last, np.uint8)
        return
    numbers = target[: 2 * len(last)].view(_NUMBERS)
    np.multiply(np.frombuffer(last, np.uint8), _PLACE, out=numbers, dtype=_NUMBERS)  # faster than shifting
    np.add(numbers, np.frombuffer(first, np.uint8, len(last)), out=numbers)
    if len(first) > len(last):
        target[-1] = first[-1]


class PackedBlocks:
    """The blocks of one packed file, open for reading. Thread-safe.

    is_on: whether sources read from this file.
    """

    def __init__(self, packed: PackedFile) -> None:
        """Open the file. Raises PackedFileError for a bad table, ModelFileError, NotSupported without zstandard."""
        self._zstandard = need("zstandard", PACK)
        self._content_size = self._zstandard.frame_content_size
        self.packed = packed
        self.is_on = True
        self._is_apart = packed.facts.number_bytes == 2
        self.file = SourceFile(packed.path, packed.identity)
        table = read_table(packed.table)
        self._starts = table["start"].astype(np.int64)
        self._middles = self._starts + table["first"]
        self._ends = self._middles + table["second"]
        self._shards = table["shard"]
        self._numbers = table["number"]
        longest = int((self._ends - self._starts).max())
        if int(self._ends.max()) > self.file.size_bytes or longest > READ_BYTES:
            self.file.close()
            raise PackedFileError(f"{packed.path}: damaged, a block is outside; {packed_anew()}")
        self._own, self._memory = threading.local(), ThreadMemory(_BUFFER_BYTES)

    def entries_of(self, shard: int, size_bytes: int) -> npt.NDArray[np.int32]:
        """Return the table entry of each block of a shard of `size_bytes`; -1 for a block that is not packed."""
        n_blocks = -(-size_bytes // self.packed.facts.block_bytes)
        entries = np.full(n_blocks, -1, np.int32)
        mine = np.flatnonzero((self._shards == shard) & (self._numbers < n_blocks))
        entries[self._numbers[mine]] = mine
        return entries

    def run_of(self, entries: Sequence[int]) -> int:
        """Return how many of the first `entries` lie one behind the other in the file and fit in one read."""
        first = entries[0]
        start = round_down(int(self._starts[first]), _libc.PAGE)
        count = 1
        while (
            count < len(entries)
            and entries[count] == first + count
            and self._starts[first + count] == self._ends[first + count - 1]
            and int(self._ends[first + count]) - start <= READ_BYTES
        ):
            count += 1
        return count

    def read(self, first: int, count: int) -> tuple[list[Frames], int]:
        """Return `count` packed blocks from entry `first` on, and the bytes read. The thread's next read replaces them.

        Raises TierReadError or ModelFileError.
        """
        start = round_down(int(self._starts[first]), _libc.PAGE)
        stop = int(self._ends[first + count - 1])
        address = self._memory.mine()
        n_bytes = self.file.read_into(address, round_up(stop, _libc.PAGE) - start, start)
        data = _libc.view(address, _BUFFER_BYTES)
        places = ((at[first : first + count] - start).tolist() for at in (self._starts, self._middles, self._ends))
        return [(data[begin:middle], data[middle:end]) for begin, middle, end in zip(*places, strict=True)], n_bytes

    def unpack(self, frames: Frames, target: Bytes) -> None:
        """Unpack the `frames` of a block into `target`. Raises PackedFileError where one is damaged."""
        if not self._is_apart:
            set_together(self._content(frames[0], len(target)), b"", target)
            return
        length = len(target) // 2
        set_together(self._content(frames[0], length), self._content(frames[1], len(target) - length), target)

    def _content(self, frame: memoryview, length: int) -> bytes:
        try:
            if self._content_size(frame) != length:
                raise self._damaged("its length is another")
            content: bytes = self._unpacker().decompress(frame)
        except self._zstandard.ZstdError as error:
            raise self._damaged(str(error)) from error
        return content

    def close(self) -> None:
        """Close the file and free the read buffers; no reader may be at work any more. Idempotent."""
        self.file.close()
        self._memory.close()

    def _damaged(self, why: str) -> PackedFileError:
        return PackedFileError(
            f"{self.packed.path}: a block is damaged ({why}); {packed_anew()}",
        )

    def _unpacker(self) -> Any:
        try:
            return self._own.unpacker
        except AttributeError:
            self._own.unpacker = self._zstandard.ZstdDecompressor()
            return self._own.unpacker


class PackedSource:
    """A shard whose packed blocks are read from `blocks`, and all else from `plain`. Thread-safe."""

    def __init__(self, plain: SourceFile, shard: int, blocks: PackedBlocks) -> None:
        self._plain, self._blocks = plain, blocks
        self._block_bytes = blocks.packed.facts.block_bytes
        self._entries = blocks.entries_of(shard, plain.size_bytes)
        self.path, self.size_bytes = plain.path, plain.size_bytes

    @property
    def is_doubtful(self) -> bool:
        """Whether either file may have changed."""
        return self._plain.is_doubtful or self._blocks.file.is_doubtful

    def read_into(self, address: int, length: int, offset: int) -> int:
        """Fill memory at `address` from `offset`, both page-aligned; return the bytes read from storage.

        Raises like `SourceFile.read_into`, and PackedFileError where a packed block is damaged.
        """
        if not self._blocks.is_on:
            return self._plain.read_into(address, length, offset)
        block, stop = self._block_bytes, min(offset + length, self._plain.size_bytes)
        n_bytes, position = 0, offset
        while position < stop:
            first, last = position // block, (stop - 1) // block
            entries = self._entries[first : last + 1].tolist()
            if entries[0] >= 0:
                count = self._blocks.run_of(entries)
                n_bytes += self._unpack(address - offset, position, stop, entries[0], count)
            else:
                count = next((i for i, entry in enumerate(entries) if entry >= 0), len(entries))
                plain_stop = min((first + count) * block, offset + length)
                n_bytes += self._plain.read_into(address + position - offset, plain_stop - position, position)
            position = (first + count) * block
        return n_bytes

    def read_pieces(self, pieces: Sequence[tuple[int, int]], offset: int) -> int:
        """Fill the `pieces` of memory, (address, length) each, one after the other; else as `read_into`."""
        n_bytes = 0
        for address, length in pieces:
            n_bytes += self.read_into(address, length, offset)
            offset += length
        return n_bytes

    def _unpack(self, base: int, position: int, stop: int, entry: int, count: int) -> int:
        """Unpack the parts of `count` blocks, from `entry` on, that lie in [position, stop), to `base` + offset."""
        blocks, n_bytes = self._blocks.read(entry, count)
        start = round_down(position, self._block_bytes)
        stop = min(stop, start + count * self._block_bytes)
        target = np.frombuffer(_libc.view(base + position, stop - position), np.uint8)
        for frames in blocks:
            end = min(start + self._block_bytes, self._plain.size_bytes)
            low, high = max(start, position), min(end, stop)
            if (low, high) == (start, end):
                self._blocks.unpack(frames, target[low - position : high - position])
            else:
                whole = np.empty(end - start, np.uint8)
                self._blocks.unpack(frames, whole)
                target[low - position : high - position] = whole[low - start : high - start]
            start += self._block_bytes
        return n_bytes
