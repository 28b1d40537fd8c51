"""Brings kept rows back into a context: its cells by passes that compute nothing, then the rows from their files."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from edge_run.base.errors import KernelError, NotSupported, reason_of
from edge_run.base.interrupt import JoinedThread, go_on, join_all
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.keeping.search import KeptPrefix
from edge_run.runtime.keeping.store import remove
from edge_run.runtime.keeping.writer import HANG_S
from edge_run.runtime.llama import _ggml as ggml
from edge_run.tiers.kv.block_file import DamagedRows, RowsHead, RowsVoid, clear_part, place_part, read_rows
from edge_run.tiers.kv.layout import BLOCK_ROWS, KvLayout, MemoryPart
from edge_run.tiers.kv.record import RowPass, reading

READERS = 2
_TRIED_TOKENS = 64  # of a text that is placed to see where its rows lie
NO_ANSWER = "the drive does not answer"


class _Arrivals:
    """Parts of files on their way into cells, until `end`. moved_s: when the last one came."""

    def __init__(self) -> None:
        self.moved_s, self._lock, self._is_over = time.monotonic(), threading.Lock(), False

    def place(self, part: MemoryPart, content: bytes) -> None:
        """Put a part where it belongs. Raises RowsVoid after the end: the cells may be another text's."""
        with self._lock:
            if self._is_over:
                raise RowsVoid
            place_part(part, content)
        self.moved_s = time.monotonic()

    def end(self) -> None:
        """Nothing is placed from now on."""
        with self._lock:
            self._is_over = True


class RowRestorer:
    """Puts kept rows into the context of `decoder`, which belongs to one sequence.

    key: of the rows. width: tokens in a pass at most. check: may raise, to end a reading.
    """

    def __init__(
        self, decoder: LocalDecoder, layout: KvLayout, key: bytes, width: int, check: Callable[[], None]
    ) -> None:
        self._decoder, self._layout, self._key, self._width, self._check = decoder, layout, key, width, check
        self._rows_at = {tensor.address for tensor in layout.rows if tensor.n_rows == 1}

    @property
    def context_tokens(self) -> int:
        """The tokens that the context has room for."""
        return self._decoder.capabilities.context_tokens

    def restore(self, prefix: KeptPrefix, tokens: Sequence[int]) -> tuple[int, str]:
        """Make the context hold the first `prefix.position` tokens of `tokens`.

        Returns how many it has the rows of, fewer or none where files are damaged or gone, and what failed, in a
        clause. Raises what `LocalDecoder.place` raises, and Cancelled; the context is empty then.
        """
        self._decoder.clear()
        try:
            if prefix.snapshot:
                assert prefix.passes is not None
                self._place_cells(tokens[: prefix.position], prefix.passes)
                failure = self._read_all(prefix, tokens)
                if failure:
                    self._decoder.clear()
                return (0 if failure else prefix.position), failure
            n_rows = len(prefix.blocks) * BLOCK_ROWS
            self._place_cells(tokens[:n_rows], reading(n_rows, self._width))
            n_good, failure = self._read_blocks(prefix, tokens)
            return min(n_good * BLOCK_ROWS, prefix.position), failure
        except BaseException:
            self._decoder.clear()
            raise

    def check(self) -> None:
        """Raise NotSupported where llama.cpp does not put positions into cells as the layout has them.

        The context must be empty, and is left empty.
        """
        try:
            n_tokens = min(self._width, _TRIED_TOKENS)
            for start in (0, n_tokens):
                self._place([0] * n_tokens, start)
        except KernelError as error:
            raise NotSupported(f"this model's rows do not lie in the order of its tokens ({error})") from error
        finally:
            self._decoder.clear()

    def clear(self) -> None:
        """Empty the context."""
        self._decoder.clear()

    def cut(self, position: int) -> None:
        """Cut the context at `position`."""
        self._decoder.rewind(0, position)

    def _place_cells(self, tokens: Sequence[int], passes: Sequence[RowPass]) -> None:
        for number, (start, width) in enumerate(passes):
            self._check()
            part = [*tokens[start : start + width]]
            part += [0] * (width - len(part))  # of guesses that were taken back
            self._place(part, start)
            stop = passes[number + 1].start if number + 1 < len(passes) else len(tokens)
            if stop < start + width and self._decoder.rewind(0, stop) != stop:
                raise KernelError(f"llama.cpp does not cut its cache at {stop} as it did before")

    def _place(self, tokens: Sequence[int], start: int) -> None:
        self._decoder.place(tokens, start, partial(self._look, cells=range(start, start + len(tokens))))

    def _look(self, address: int, cells: range) -> None:
        """Check that llama.cpp would write the rows of a pass into `cells`, where the layout has them."""
        rows = ggml.rows_written(address)
        if rows is None or rows[0] not in self._rows_at:
            return
        if rows[1].tolist() != list(cells):
            raise KernelError(f"llama.cpp puts positions from {cells.start} on into cells {rows[1][:3].tolist()}")

    def _head(self, tokens: Sequence[int], part_bytes: int) -> RowsHead:
        return RowsHead(self._key, tokens, part_bytes)

    def _read_all(self, prefix: KeptPrefix, tokens: Sequence[int]) -> str:
        """Fill blocks and snapshot; return what failed."""
        _, failure = self._read_blocks(prefix, tokens)
        if failure or prefix.snapshot is None:
            return failure
        start = prefix.position // BLOCK_ROWS * BLOCK_ROWS
        head = self._head(tokens[start : prefix.position], self._layout.snapshot_bytes(start, prefix.position))
        parts = list(self._layout.snapshot_parts(start, prefix.position))
        errors, arrivals, snapshot = list[BaseException](), _Arrivals(), prefix.snapshot

        def read() -> None:
            try:
                read_rows(snapshot, head, parts, self._check, arrivals.place)
            except BaseException as error:  # raised by who waits
                errors.append(error)

        try:
            has_ended = self._arrive(read, 1, go_on, arrivals)
        except BaseException:
            _clear(parts)
            raise
        if has_ended and not errors:
            return ""
        _clear(parts)
        if not has_ended:
            return NO_ANSWER
        if not isinstance(errors[0], (OSError, DamagedRows)):
            raise errors[0]
        if isinstance(errors[0], DamagedRows):
            remove(snapshot)
        return _reason(snapshot, errors[0])

    def _read_blocks(self, prefix: KeptPrefix, tokens: Sequence[int]) -> tuple[int, str]:
        """Fill the rows of blocks; return how many from the first one on are right, and what is wrong with the next."""
        failures: list[BaseException | None] = [None] * len(prefix.blocks)
        left, arrivals = deque(range(len(failures))), _Arrivals()

        def read() -> None:
            with contextlib.suppress(IndexError):
                while True:
                    block = left.popleft()
                    failures[block] = self._read_block(block, prefix, tokens, arrivals)

        try:
            has_ended = self._arrive(read, READERS, left.clear, arrivals)
        except BaseException:
            self._clear_blocks(range(len(failures)))
            raise
        if not has_ended:
            self._clear_blocks(range(len(failures)))
            return 0, NO_ANSWER
        for bad, error in enumerate(failures):
            if error is not None:
                self._clear_blocks(range(bad, len(failures)))
                if not isinstance(error, (OSError, DamagedRows)):
                    raise error
                return bad, _reason(prefix.blocks[bad], error)
        return len(failures), ""

    def _arrive(
        self, read: Callable[[], None], n_threads: int, give_up: Callable[[], object], arrivals: _Arrivals
    ) -> bool:
        """Run `read` in threads; return whether all have ended: they have not where the drive does not answer."""
        threads = list[JoinedThread]()

        def hangs() -> bool:
            self._check()
            return time.monotonic() - arrivals.moved_s > HANG_S

        try:
            for _ in range(n_threads):
                thread = JoinedThread(read, "edge-run-kept-rows")
                thread.start()
                threads.append(thread)
        except RuntimeError:  # no thread more can be started
            read()
        finally:
            try:
                join_all(threads, give_up, hangs)
            finally:
                arrivals.end()
        has_ended = all(thread.has_ended.is_set() for thread in threads)
        if not has_ended:
            give_up()
        return has_ended

    def _clear_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            _clear(self._layout.row_parts(block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS))

    def _read_block(
        self, block: int, prefix: KeptPrefix, tokens: Sequence[int], arrivals: _Arrivals
    ) -> BaseException | None:
        start, stop = block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS
        head = self._head(tokens[start:stop], self._layout.row_bytes(BLOCK_ROWS))
        try:
            read_rows(prefix.blocks[block], head, self._layout.row_parts(start, stop), self._check, arrivals.place)
        except DamagedRows as error:
            remove(prefix.blocks[block])
            return error
        except BaseException as error:  # raised by who waits, once all have ended
            return error
        return None


def _reason(file: Path, error: OSError | DamagedRows) -> str:
    """Return what failed, in a clause."""
    return f"{file.name}: {reason_of(error)}" if isinstance(error, OSError) else str(error)


def _clear(parts: Iterable[MemoryPart]) -> None:
    """Leave no damaged numbers in memory: attention multiplies what it masks by zero, which NaN survives."""
    for part in parts:
        clear_part(part)
