"""A model file as a source of bytes, some blocks of which lie in a packed file with their weights repacked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from edge_run.tiers.packed_file import PackedFile
from edge_run.tiers.packed_index import read_table
from edge_run.tiers.source import PiecewiseSource, SourceFile


class _Stretch(NamedTuple):
    """Bytes [start, stop) of a shard, in whole pages, and where in the packed file they begin."""

    start: int
    stop: int
    place: int


class RepackedBlocks:
    """A shard whose blocks in the packed file are read from there, and all else from `plain`. Thread-safe."""

    def __init__(self, plain: PiecewiseSource, shard: int, packed: PackedFile, packed_file: SourceFile) -> None:
        """packed: the packed file. packed_file: the same, open for reading."""
        self._plain, self._file = plain, packed_file
        self.path: Path = plain.path
        self.size_bytes: int = plain.size_bytes
        self._stretches = _stretches(shard, packed)

    @property
    def is_doubtful(self) -> bool:
        """Whether either file may have changed."""
        return self._plain.is_doubtful or self._file.is_doubtful

    def read_into(self, address: int, length: int, offset: int) -> int:
        """Fill memory at `address` from `offset`, both page-aligned; return the bytes read from storage.

        Raises like `SourceFile.read_into`.
        """
        return self.read_pieces([(address, length)], offset)

    def read_pieces(self, pieces: Sequence[tuple[int, int]], offset: int) -> int:
        """Fill the `pieces` of memory, (address, length) each, one after the other, as `read_into` does."""
        n_bytes = 0
        stop = offset + sum(length for _, length in pieces)
        for source, start, end, place in self._parts(offset, stop):
            n_bytes += source.read_pieces(_within(pieces, start - offset, end - offset), place)
        return n_bytes

    def _parts(self, start: int, stop: int) -> Iterator[tuple[PiecewiseSource, int, int, int]]:
        """Yield (source, first byte, stop, place of the first byte in the source) of what [start, stop) consists of."""
        for stretch in self._stretches:
            if stretch.stop <= start or start >= stop:
                continue
            if stretch.start > start:
                plain_stop = min(stretch.start, stop)
                yield self._plain, start, plain_stop, start
                start = plain_stop
            end = min(stretch.stop, stop)
            if start < end:
                yield self._file, start, end, stretch.place + start - stretch.start
                start = end
        if start < stop:
            yield self._plain, start, stop, start


def _stretches(shard: int, packed: PackedFile) -> list[_Stretch]:
    """Return what the packed file has of a shard, as few stretches as there are."""
    table, block_bytes = read_table(packed.table), packed.facts.block_bytes
    found = list[_Stretch]()
    for block in table[table["shard"] == shard]:
        start, place = int(block["number"]) * block_bytes, int(block["start"])
        stop = start + int(block["first"])
        if found and found[-1].stop == start and found[-1].place + start - found[-1].start == place:
            found[-1] = found[-1]._replace(stop=stop)
        else:
            found.append(_Stretch(start, stop, place))
    return found


def _within(pieces: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return what of `pieces`, laid one after the other, lies in [start, stop)."""
    found, position = list[tuple[int, int]](), 0
    for address, length in pieces:
        low, high = max(start, position), min(stop, position + length)
        if low < high:
            found.append((address + low - position, high - low))
        position += length
    return found
