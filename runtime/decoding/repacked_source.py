"""A model file as a source of bytes, some of whose weights are repacked by the reader that brings them.

Rows are interleaved in groups, and a read of whole chunks begins and ends somewhere in a group. The rest of these two
groups is read along with it, into memory of the reader's own. So each read is repacked for itself, in whatever order
chunks come and go, and what a chunk holds does not depend on the chunks that were read with it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_run.base.units import round_down, round_up
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.holdings import repacking_bytes
from edge_run.runtime.llama.repacking import RepackedWeight
from edge_run.tiers import _libc
from edge_run.tiers.readers import ThreadMemory
from edge_run.tiers.source import PiecewiseSource


class RepackRooms:
    """Memory in which threads repack, one room for each thread. Thread-safe."""

    def __init__(self, group_bytes: int) -> None:
        """Make rooms for groups of at most `group_bytes`."""
        self._edge_bytes, self._memory = round_up(group_bytes, _libc.PAGE), ThreadMemory(repacking_bytes(group_bytes))

    def mine(self) -> tuple[int, int, int]:
        """Return addresses in this thread's room: for what lies before a read, for what lies after it, for copies."""
        room = self._memory.mine()
        return room, room + self._edge_bytes, room + 2 * self._edge_bytes

    def close(self) -> None:
        """Free the rooms; no thread may be at work any more. Idempotent."""
        self._memory.close()


@dataclass(frozen=True, slots=True)
class _Part:
    """The groups of a weight that a read has a share in, [first, stop) in the file."""

    weight: RepackedWeight
    first: int
    stop: int


class RepackedSource:
    """A shard whose weights are read from `plain` and repacked. Thread-safe."""

    def __init__(
        self, plain: PiecewiseSource, weights: Sequence[tuple[int, RepackedWeight]], rooms: RepackRooms
    ) -> None:
        """Repack `weights`, each with its first byte in the file, in order."""
        self._plain, self._weights, self._rooms = plain, weights, rooms
        self._starts = [start for start, _ in weights]
        self.path: Path = plain.path
        self.size_bytes: int = plain.size_bytes

    @property
    def is_doubtful(self) -> bool:
        """Whether the file may have changed."""
        return self._plain.is_doubtful

    def read_into(self, address: int, length: int, offset: int) -> int:
        """Fill memory at `address` from `offset`, both page-aligned; return the bytes read from storage.

        Raises like the source that it reads from.
        """
        stop = offset + length
        parts = self._parts(offset, stop)
        if not parts:
            return self._plain.read_into(address, length, offset)
        head, tail, copy = self._rooms.mine()
        begin = min(offset, round_down(parts[0].first, _libc.PAGE))
        end = max(stop, round_up(parts[-1].stop, _libc.PAGE))
        ranges = [(begin, offset, head), (offset, stop, address), (stop, end, tail)]
        n_bytes = self._plain.read_pieces([(at, high - low) for low, high, at in ranges if high > low], begin)
        for part in parts:
            group_bytes = part.weight.group_bytes
            first, last = part.first, part.stop
            if first < offset:
                self._repack_group(part.weight, first, ranges, copy, head)
                first += group_bytes
            if last > stop and first < last:
                last -= group_bytes
                self._repack_group(part.weight, last, ranges, copy, tail)
            part.weight.repack(address + first - offset, last - first, copy)
        return n_bytes

    def _parts(self, offset: int, stop: int) -> list[_Part]:
        parts = []
        for start, weight in self._weights[max(0, bisect_right(self._starts, offset) - 1) :]:
            low, high = max(offset, start) - start, min(stop, start + weight.size_bytes) - start
            if start >= stop:
                break
            if low < high:
                first, last = round_down(low, weight.group_bytes), round_up(high, weight.group_bytes)
                parts.append(_Part(weight, start + first, start + last))
        return parts

    @staticmethod
    def _repack_group(
        weight: RepackedWeight, first: int, ranges: Sequence[tuple[int, int, int]], copy: int, spare: int
    ) -> None:
        """Repack the group from byte `first` of the file on, of which only a part belongs to the read.

        ranges: (first byte, stop, address) of what was read; the second is the read's own.
        spare: memory for the group, which may be that of its other part.
        """
        stop = first + weight.group_bytes
        for low, high, at in ranges:
            start, length = max(low, first), min(high, stop) - max(low, first)
            if length > 0:
                _libc.copy(at + start - low, copy + start - first, length)
        ggml.repack_rows(weight.tensor, weight.group_bytes, copy, spare)
        low, high, at = ranges[1]
        start, length = max(low, first), min(high, stop) - max(low, first)
        _libc.copy(spare + start - first, at + start - low, length)
