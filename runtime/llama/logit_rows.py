"""Memory for the logits that passes give."""

from __future__ import annotations

import mmap

from edge_run.base.protocols import Logits
from edge_run.runtime.llama.holdings import LOGIT_BYTES

_LEAST_MAPPED_BYTES = 1 << 20


class LogitRows:
    """The rows of a decoder, `(rows, vocabulary)`: the same memory for each batch, but for those of many passes."""

    def __init__(self, most_rows: int, vocabulary: int) -> None:
        """most_rows: of a batch in the memory that stays, which is made for the first one."""
        self._most_rows, self._vocabulary = most_rows, vocabulary
        self._rows: Logits | None = None

    def take(self, n_rows: int) -> Logits:
        """Return rows to be written; they are valid until they are asked for again."""
        if n_rows > self._most_rows:
            return self._new(n_rows)
        if self._rows is None:
            self._rows = self._new(self._most_rows)  # no memory before they are written
        return self._rows[:n_rows]

    def _new(self, n_rows: int) -> Logits:
        """Return memory for rows, where it is much such that all of it is given back: the C library keeps pieces."""
        import numpy as np  # which takes long to load, and who follows without logits does without

        n_bytes = LOGIT_BYTES * n_rows * self._vocabulary
        memory = mmap.mmap(-1, n_bytes) if n_bytes >= _LEAST_MAPPED_BYTES else bytearray(n_bytes)
        return np.frombuffer(memory, np.float32).reshape(n_rows, -1)
