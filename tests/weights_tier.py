"""Weights over files of random bytes, for tests: real reads, which a test can watch, hold up and let fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edge_run.tiers.address_space import AddressSpace
from edge_run.tiers.chunk_states import ChunkState
from edge_run.tiers.on_demand import OnDemand
from edge_run.tiers.readers import Readers
from edge_run.tiers.residency import Residency
from edge_run.tiers.source import SourceFile
from edge_run.tiers.weights import WeightsInOrder, WeightsOnDemand
from mapped import PAGE, content, mapped, write_random

CHUNK = 4 * PAGE
WAIT_S = 30


class Tier:
    """Weights over files of random bytes, and what the test knows of them."""

    def __init__(
        self, address_space: AddressSpace, paths: Sequence[Path], residency: Residency | OnDemand, readers: Readers
    ) -> None:
        self.address_space, self.residency, self.readers = address_space, residency, readers
        self.data = [path.read_bytes() for path in paths]
        self.sources = [SourceFile(path) for path in paths]
        self.reads: list[tuple[int, int]] = []
        for source in self.sources:
            self._observe(source)
        self.check: Callable[[], None] = lambda: None
        kind = WeightsOnDemand if isinstance(residency, OnDemand) else WeightsInOrder
        self.weights = kind(address_space, self.sources, readers, residency, check=self._check)
        self.fail: Callable[[int], None] = lambda offset: None

    def _check(self) -> None:
        self.check()

    def _observe(self, source: SourceFile) -> None:
        real = source.read_into

        def read_into(address: int, length: int, offset: int) -> int:
            self.reads.append((offset, length))
            self.fail(offset)
            return real(address, length, offset)

        source.read_into = read_into  # type: ignore[method-assign]

    def is_right(self, chunk: int) -> bool:
        place = self.address_space.place(chunk)
        wanted = self.data[place.shard][place.file_offset : place.file_offset + place.length]
        return content(place.address, len(wanted)) == wanted

    def hold_reads(self) -> threading.Event:
        """Let no read end before the event that is returned."""
        may_read = threading.Event()

        def wait(offset: int) -> None:
            assert may_read.wait(WAIT_S)

        self.fail = wait
        return may_read

    def fail_first(self, error: Exception, n_times: int = 1) -> list[Exception]:
        """Let the next reads fail, so many of them; return the failures that are still to come."""
        failures = [error] * n_times

        def fail(offset: int) -> None:
            if failures:
                raise failures.pop()

        self.fail = fail
        return failures

    def await_read(self) -> None:
        """Wait until a read has begun."""
        while not self.reads:
            threading.Event().wait(0.002)

    def settle(self) -> None:
        """Wait until every read that was asked for is done."""
        self.weights.release(())  # with what was let go before
        while any(self.residency.state(chunk) is ChunkState.LOADING for chunk in range(self.address_space.n_chunks)):
            threading.Event().wait(0.002)


@contextmanager
def tier(
    folder: Path,
    sizes_bytes: Sequence[int],
    order: Sequence[int],
    pinned: Sequence[int] = (),
    n_frames: int = 0,
    *,
    n_readers: int = 2,
    shift_bytes: int = 0,
    hole: range | None = None,
    is_on_demand: bool = False,
) -> Iterator[Tier]:
    """Yield weights over files of `sizes_bytes`, `shift_bytes` off the grid of chunks; the first may have a hole."""
    paths = [folder / f"shard-{i}" for i in range(len(sizes_bytes))]
    for i, (path, size_bytes) in enumerate(zip(paths, sizes_bytes, strict=True)):
        write_random(path, size_bytes, seed=i)
    with mapped(sizes_bytes, CHUNK, shift_bytes=shift_bytes, hole=hole) as address_space:
        n_chunks = address_space.n_chunks
        residency: OnDemand | Residency = Residency(n_chunks, order, pinned, n_frames)
        if is_on_demand:
            residency = OnDemand(n_chunks, n_frames, address_space.unmovable)
        readers = Readers(n_readers)
        try:
            yield Tier(address_space, paths, residency, readers)
        finally:
            readers.close()
