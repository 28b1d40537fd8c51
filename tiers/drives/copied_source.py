"""A shard that is read from two files on two drives, the model's and its copy, whichever has a read done first.

A read that fails on one drive is done again from the other, and so is one that hangs there. It costs time, never a
byte: reads go to buffers of their own (`lanes.py`), and only what was read whole is copied to where it belongs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from edge_run.base.errors import EdgeRunError, TierReadError, from_system
from edge_run.base.files.identity import FileIdentity
from edge_run.base.protocols import Clock
from edge_run.base.units import KIB, round_up
from edge_run.tiers import _libc
from edge_run.tiers.drives.lanes import PART_BYTES, Lane, Reading
from edge_run.tiers.drives.stripes import LEAST_PATIENCE_S, Stripes
from edge_run.tiers.readers import ReadTotals
from edge_run.tiers.source import SourceFile

FILES = 2  # the model and its copy
STACK_BYTES = 64 * KIB  # of a thread, in use

Read = Callable[[int], int]


def buffer_bytes(n_readers: int) -> int:
    """Return what so many readers take: a buffer each, one each for what hangs at a drive, and the drives' threads."""
    return FILES * n_readers * (PART_BYTES + STACK_BYTES)


class Drives:
    """The drives of a model and of its copy, with the threads that read from them. Thread-safe.

    say: is told, in a line, what a drive did that is gone on without.
    totals: what was read from the copy, and done again.
    """

    def __init__(self, n_readers: int, clock: Clock = time.monotonic) -> None:
        self.say: Callable[[str], object] = self._keep
        self.totals = ReadTotals()
        self._stripes, self._lock = Stripes(FILES, clock), threading.Lock()
        self._said = set[tuple[int, str]]()
        self._kept: list[str] = []
        self._own = threading.local()
        self._buffers: set[int] = set()
        self._lanes: list[Lane] = []
        try:
            for drive in range(FILES):  # each is known before the next is made: it has threads
                self._lanes.append(Lane(n_readers, drive))
        except BaseException:
            self.close()
            raise

    def tell(self, say: Callable[[str], object]) -> None:
        """Have `say` told from now on, and of what there was so far."""
        with self._lock:
            self.say, kept, self._kept = say, self._kept, []
            for line in kept:
                say(line)

    def read(self, reads: Sequence[Read], paths: Sequence[Path], address: int, length: int) -> int:
        """Fill `length` bytes at `address`, PART_BYTES at most, by one of `reads`; return the bytes read.

        reads, paths: of the model and of its copy, where each fills memory at an address.

        Raises TierReadError where both fail, and ModelFileError where one has changed.
        """
        failed: list[int] = []
        failure: TierReadError | None = None
        is_again = False
        while (drive := self._begin(length, failed, is_again=is_again)) is not None:
            is_again = True
            reading = Reading(reads[drive], self._buffer())
            self._lanes[drive].submit(reading)
            if not self._wait(reading, drive, length, failed):
                self._note_trouble(
                    drive, f"{paths[drive]}: the drive does not answer; read again from {paths[1 - drive]}"
                )
                continue
            try:
                n_bytes = reading.n_bytes
            except TierReadError as error:
                self._end(drive, length, is_good=False)
                failed.append(drive)
                failure = error
                self._note_trouble(drive, f"{error}; read again from {paths[1 - drive]}", "failed")
                continue
            except BaseException:
                self._end(drive, length, is_good=False)
                raise
            self._end(drive, length)
            _libc.copy(self._buffer(), address, n_bytes)
            return n_bytes
        assert failure is not None
        raise failure

    def check(self, checks: Sequence[Callable[[], None]], paths: Sequence[Path]) -> None:
        """Do those of `checks`, of the model and of its copy, whose drive does not hang. `paths` are their files.

        Raises what they raise, but an error of the system only where both have one.
        """
        failures = []
        for drive, check in enumerate(checks):
            with self._lock:
                if not self._stripes.is_answering(drive):
                    continue
            try:
                check()
            except OSError as error:
                if isinstance(error, EdgeRunError):
                    raise
                failure = from_system(error, f"{paths[drive]}: asking whether it has changed")
                failures.append(failure)
                self._note_trouble(drive, f"{failure}; gone on with {paths[1 - drive]}", "failed")
        if len(failures) == FILES:
            raise failures[0]

    def close(self) -> None:
        """End the threads and free the buffers; no reader may be at work any more. Idempotent."""
        for drive, lane in enumerate(self._lanes):
            lane.close(is_answering=self._stripes.is_answering(drive))
        with self._lock:
            buffers, self._buffers = self._buffers, set()
        for buffer in buffers:
            _libc.unmap(buffer, PART_BYTES)

    def _begin(self, length: int, failed: Sequence[int], *, is_again: bool) -> int | None:
        with self._lock:
            self.totals += ReadTotals(repeated_reads=int(is_again and len(failed) < FILES))
            return self._stripes.begin(length, failed)

    def _end(self, drive: int, length: int, *, is_good: bool = True) -> None:
        with self._lock:
            (self._stripes.end if is_good else self._stripes.fail)(drive, length)
            self.totals += ReadTotals(copy_bytes=length if drive and is_good else 0)

    def _wait(self, reading: Reading, drive: int, length: int, failed: Sequence[int]) -> bool:
        """Wait until `reading` has ended; return False where it was left, since it hangs and another drive answers.

        failed: the drives that failed at this read.
        """
        others, waited_s = [other for other in range(FILES) if other != drive and other not in failed], 0.0
        while not reading.has_ended(LEAST_PATIENCE_S):
            waited_s += LEAST_PATIENCE_S
            with self._lock:  # other reads may have shown meanwhile how fast the drive is
                if waited_s < self._stripes.patience_s(drive) or not any(map(self._stripes.is_answering, others)):
                    continue
                if not reading.leave(partial(self._revive, drive, length)):
                    break
                self._stripes.hang(drive)
                self._buffers.discard(self._own.buffer)
                del self._own.buffer
                return False
        return True

    def _revive(self, drive: int, length: int) -> None:
        with self._lock:
            self._stripes.revive(drive, length)

    def _buffer(self) -> int:
        """Return the address of this thread's buffer."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = _new_buffer()
            with self._lock:
                self._buffers.add(self._own.buffer)
        address: int = self._own.buffer
        return address

    def _note_trouble(self, drive: int, line: str, kind: str = "hangs") -> None:
        """Say `line`, the first time that `drive` has this kind of trouble."""
        with self._lock:
            if (drive, kind) in self._said:
                return
            self._said.add((drive, kind))
            self.say(line)

    def _keep(self, line: str) -> None:
        self._kept.append(line)


def _new_buffer() -> int:
    """Return the address of a new buffer, which is a huge page where the kernel gives them."""
    area = _libc.map_anonymous(2 * PART_BYTES)
    buffer = round_up(area, PART_BYTES)
    for start, stop in ((area, buffer), (buffer + PART_BYTES, area + 2 * PART_BYTES)):
        if stop > start:
            _libc.unmap(start, stop - start)
    _libc.advise_working_memory(buffer, PART_BYTES)
    return buffer


class CopiedSource(SourceFile):
    """A shard with a copy on another drive, open for reading."""

    def __init__(
        self,
        path: Path,
        copy: Path,
        drives: Drives,
        expected: FileIdentity | None = None,
        expected_copy: FileIdentity | None = None,
    ) -> None:
        """Read from `path` and `copy`, which hold the same bytes.

        expected, expected_copy: which files they are, as in `SourceFile`. Raises ModelFileError.
        """
        self._drives = drives
        super().__init__(path, expected)
        try:
            self._copy = SourceFile(copy, expected_copy)
        except BaseException:
            super().close()
            raise

    def check_unchanged(self) -> None:
        """Raise ModelFileError when either file was written to since it was opened, as far as their drives answer."""
        self._drives.check([super().check_unchanged, self._copy.check_unchanged], (self.path, self._copy.path))
        self.is_doubtful |= self._copy.is_doubtful

    def read_pieces(self, pieces: Sequence[tuple[int, int]], offset: int) -> int:
        """Fill the `pieces` of memory, part by part, each from either file. Raises like any source."""
        asked_bytes = sum(length for _, length in pieces)
        if self._cache and self._cache.holds(offset, asked_bytes, least_share=1):  # else a drive is asked
            with contextlib.suppress(TierReadError):  # the kernel has just taken a page away
                return super().read_pieces(pieces, offset)
        n_bytes, paths = 0, (self.path, self._copy.path)
        for start, length in pieces:
            for place in range(0, length, PART_BYTES):
                size = min(PART_BYTES, length - place)
                reads = [
                    partial(read, length=size, offset=offset + place) for read in (self._own_part, self._copy_part)
                ]
                n_bytes += self._drives.read(reads, paths, start + place, size)
            offset += length
        return n_bytes

    def _own_part(self, address: int, *, length: int, offset: int) -> int:
        return super().read_pieces([(address, length)], offset)

    def _copy_part(self, address: int, *, length: int, offset: int) -> int:
        return self._copy.read_pieces([(address, length)], offset)

    def close(self) -> None:
        """Close both files. Idempotent."""
        super().close()
        if hasattr(self, "_copy"):
            self._copy.close()
