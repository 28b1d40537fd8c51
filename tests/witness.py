"""Looks, while an engine runs, whether what is lent and what is written go together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.planning.memory_plan import PAGE_TABLE_SHARE
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.runtime.streaming.experts import ExpertStreaming
from edge_run.runtime.streaming.lent_residency import LentResidency
from edge_run.tiers import _libc

_WRITABLE = re.compile(r"^(\w+)-(\w+) rw", re.MULTILINE)


@dataclass
class Witness:
    """Looks, after each pass, whether what is lent and what is written go together. counts: the loans then."""

    engine: Engine | SliceEngine
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.engine, SliceEngine):
            assert self.engine._assignment
            lender, self._streams = self.engine._assignment.lent_residency, self.engine._supply.streams
        else:
            hook = self.engine.decoder._driver.before_pass  # type: ignore[attr-defined]
            cells = [cell.cell_contents for cell in hook.__closure__ or ()]
            lender = next(cell for cell in cells if isinstance(cell, LentResidency))
            self._streams = self.engine._supplied.streams
        assert lender
        self.lender = lender

    def look(self) -> None:
        loans, plan = self.lender.loans, self.engine.plan
        loans.check()
        self.counts.append(loans.n_loans)
        assert not any(self.written_above())
        own_bytes = plan.pinned_bytes + plan.window_bytes + plan.expert_bytes
        chunk_bytes = loans.loan_bytes * PAGE_TABLE_SHARE // (PAGE_TABLE_SHARE + 1)
        assert self.weight_bytes() <= own_bytes + loans.n_loans * chunk_bytes

    def weight_bytes(self) -> int:
        """The memory under weights, but for tables, of which only some rows are there."""
        loaded = self.engine.loaded if isinstance(self.engine, SliceEngine) else self.engine._loaded
        backing = loaded.backing
        assert backing is not None
        inside: set[int] = set()
        for span in backing.address_space.spans:
            inside.update(range(span.start, span.stop, _libc.PAGE))
        for stream in self._streams:
            for table in getattr(getattr(stream, "_lookups", None), "ranges", ()):
                inside.difference_update(range(table.start, table.stop, _libc.PAGE))
        least, most, n_pages = min(inside), max(inside), 0
        with ExitStack() as stack:
            for stream in self._streams:  # no frame is on its way meanwhile
                weights = stream._weights if isinstance(stream, ExpertStreaming) else stream.weights
                stack.enter_context(weights._lock)
            maps = Path("/proc/self/maps").read_text()
        for start, stop in _WRITABLE.findall(maps):
            pages = range(max(least, int(start, 16)), min(most + 1, int(stop, 16)), _libc.PAGE)
            n_pages += len(inside.intersection(pages))
        return n_pages * _libc.PAGE

    def written_above(self) -> Iterator[bool]:
        """Whether anything is written where the keys and values of cells that are counted as unused would lie."""
        room = self.lender._cells
        if room is not None:
            for stream, n_dirty in zip(room._streams, room._dirty_cells, strict=True):
                for tensor in stream.tensors:
                    for address, length in tensor.unused(n_dirty, _libc.PAGE):
                        yield bool(np.frombuffer(_libc.view(address, length), np.uint64).any())
