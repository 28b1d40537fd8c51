"""Looks, while an engine runs, whether what is lent and what is written go together."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.planning.memory_plan import PAGE_TABLE_SHARE
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.runtime.streaming.experts import ExpertStreaming
from edge_run.runtime.streaming.lent_residency import LentResidency
from edge_run.tiers import _libc

_WRITABLE = re.compile(r"^(\w+)-(\w+) rw", re.MULTILINE)
_PRESENT, _SWAPPED = (np.uint64(1 << bit) for bit in (63, 62))  # of pages, to the kernel


def is_written(address: int, length: int, pagemap: int) -> bool:
    """Whether anything but zeros is in these pages of no file; those that were never touched are not looked at."""
    pages = np.frombuffer(os.pread(pagemap, 8 * (length // _libc.PAGE), 8 * (address // _libc.PAGE)), np.uint64)
    assert len(pages) == length // _libc.PAGE
    touched = [address + _libc.PAGE * page for page in np.flatnonzero(pages & (_PRESENT | _SWAPPED)).tolist()]
    return any(np.frombuffer(_libc.view(page, _libc.PAGE), np.uint64).any() for page in touched)


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

    @cached_property
    def _inside(self) -> tuple[int, np.ndarray]:
        """The first page under weights, but for tables, and how many there are up to each page from there on."""
        loaded = self.engine.loaded if isinstance(self.engine, SliceEngine) else self.engine._loaded
        backing = loaded.backing
        assert backing is not None
        spans = backing.address_space.spans
        first, last = min(span.start for span in spans), max(span.stop for span in spans)
        inside = np.zeros((last - first) // _libc.PAGE + 1, np.int64)
        for span in spans:
            inside[(span.start - first) // _libc.PAGE : -(-(span.stop - first) // _libc.PAGE)] = 1
        for stream in self._streams:
            for table in getattr(getattr(stream, "_lookups", None), "ranges", ()):
                if not table.is_apart:
                    inside[(table.start - first) // _libc.PAGE : -(-(table.stop - first) // _libc.PAGE)] = 0
        return first, np.concatenate([[0], np.cumsum(inside)])

    def weight_bytes(self) -> int:
        """The memory under weights, but for tables, of which only some rows are there."""
        first, n_up_to = self._inside
        last, n_pages = first + _libc.PAGE * (len(n_up_to) - 1), 0
        with ExitStack() as stack:
            for stream in self._streams:  # no frame is on its way meanwhile
                weights = stream._weights if isinstance(stream, ExpertStreaming) else stream.weights
                stack.enter_context(weights._lock)
            maps = Path("/proc/self/maps").read_text()
        for start, stop in _WRITABLE.findall(maps):
            begin, end = (min(max(int(place, 16), first), last) - first for place in (start, stop))
            n_pages += int(n_up_to[end // _libc.PAGE] - n_up_to[begin // _libc.PAGE])
        return n_pages * _libc.PAGE

    def written_above(self) -> Iterator[bool]:
        """Whether anything is written where the keys and values of cells that are counted as unused would lie."""
        room = self.lender._cells
        if room is None:
            return
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            for stream, n_dirty in zip(room._streams, room._dirty_cells, strict=True):
                for tensor in stream.tensors:
                    for address, length in tensor.unused(n_dirty, _libc.PAGE):
                        yield is_written(address, length, pagemap.fileno())
