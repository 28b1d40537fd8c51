"""Rows of attentions on real memory and a real file, without llama.cpp: what each finds must be what it wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from edge_run.base.errors import Cancelled
from edge_run.tiers import _libc
from edge_run.tiers.kv.cells import Cells, CellTensor
from edge_run.tiers.kv.spill import Spill
from edge_run.tiers.kv.spill_file import SpillFile
from edge_run.tiers.kv.spill_shape import SpillShape
from edge_run.tiers.readers import Readers

PAGE = _libc.PAGE
N_CELLS, WIDTH = 3000, 300
CELL_BYTES = (96, 64, 96, 64, 200, 96)  # the last two: of an attention with one tensor, and of one that reads another's
USES = ((0, 1), (2, 3), (4,), (0, 5))


class Rig:
    """A context of some tensors, one after the other in memory, and the texts whose rows are in them.

    Most tests have one text, in a single stream.
    """

    def __init__(self, folder: Path, attentions: int, n_streams: int = 1) -> None:
        size = sum(n_streams * N_CELLS * n for n in CELL_BYTES) + 64
        self.base, self.length = _libc.map_anonymous(-(-size // PAGE) * PAGE + PAGE), -(-size // PAGE) * PAGE + PAGE
        at, tensors = self.base + 64, []
        for cell_bytes in CELL_BYTES:
            tensors.append(CellTensor(at, n_streams * N_CELLS, cell_bytes))
            at += n_streams * N_CELLS * cell_bytes
        self.cells = Cells(tensors, PAGE, n_streams)
        self.readers, self.file = Readers(3), SpillFile(folder)
        shape = SpillShape(self.cells, USES, 2 * PAGE, WIDTH, attentions)
        ranges = [(self.base + PAGE, self.length - 2 * PAGE)]
        self.checks_left: int | None = None
        self.spill = Spill(shape, ranges, 0, self.file, self.readers, self._check)
        self.random, self.ends = np.random.default_rng(0), [0] * n_streams
        self.wanted = [np.zeros((n_streams, N_CELLS, n), np.uint8) for n in CELL_BYTES]

    @property
    def n_rows(self) -> int:
        """The rows of the first text."""
        return self.ends[0]

    def run(self, n_rows: int, texts: range = range(1)) -> int:
        """A pass over so many rows more of each of `texts`; return what was held before.

        Each attention writes its own rows, and reads all of these texts.
        """
        stops = [end + n_rows * (text in texts) for text, end in enumerate(self.ends)]
        for text, end in enumerate(self.ends):
            self.spill.cut(text, end)
        full = sum(one.bytes_for(stop) for one, stop in zip(self.cells.streams, stops, strict=True))
        held = self.spill.settle(self.ends, full)
        self.spill.read_of(texts)
        for number, use in enumerate(USES):
            for tensor in use:
                for text in texts:
                    new = slice(self.ends[text], stops[text])
                    self.wanted[tensor][text, new] = self.random.integers(0, 256, (n_rows, CELL_BYTES[tensor]))
                    self._rows(tensor, text)[new] = self.wanted[tensor][text, new]
            self.spill.begin(use)
            for tensor in use:
                for text in texts:
                    found = self._rows(tensor, text)[: stops[text]]
                    assert np.array_equal(found, self.wanted[tensor][text, : stops[text]]), (number, tensor, text)
            n_ahead = self.spill._shape.attentions
            self.spill.end([USES[(number + 1 + k) % len(USES)] for k in range(n_ahead)])
        self.ends = stops
        for states in self.spill.texts:
            states.check()
        return held

    def cut(self, n_rows: int, text: int = 0) -> None:
        self.ends[text] = n_rows

    def _check(self) -> None:
        if self.checks_left == 0:
            raise Cancelled("stopped")
        self.checks_left = self.checks_left and self.checks_left - 1

    def wait_for_reads(self) -> None:
        """Wait until nothing is on its way."""
        pieces = [piece for _, some in self.spill._ahead for piece in some]
        self.spill._weights.acquire(pieces)
        self.spill._weights.release(pieces)

    def _rows(self, tensor: int, text: int = 0) -> np.ndarray:
        place = self.cells.streams[text].tensors[tensor]
        memory = _libc.view(place.address, N_CELLS * place.cell_bytes)
        return np.ndarray((N_CELLS, place.cell_bytes), np.uint8, buffer=memory)

    def resident_bytes(self) -> int:
        """What is there: of what may be read, the pages with memory."""
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        places = ((*(int(x, 16) for x in line[0].split("-")), line[1]) for line in lines)
        inside = ((max(a, self.base), min(b, self.base + self.length)) for a, b, kind in places if kind[0] == "r")
        return sum(_libc.resident_bytes(a, b - a) for a, b in inside if a < b)


@contextmanager
def rig_in(folder: Path, attentions: int = 1, n_streams: int = 1) -> Iterator[Rig]:
    rig = Rig(folder, attentions, n_streams)
    yield rig
    rig.readers.close()
    rig.file.close()
    _libc.unmap(rig.base, rig.length)
