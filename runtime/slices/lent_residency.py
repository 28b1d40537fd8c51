"""Lent residency: the part of the compute buffer that only prefill batches need is lent to weights in between.

llama.cpp's compute buffer is made for a micro-batch, and a pass of one token touches little of it. Before such a pass
the rest is given back to the kernel, and some of the chunks that stream, the lent chunks, get memory of their own and
stay. Before the next prefill batch they are evicted again. Both happen between passes, when the content of the buffer
does not matter (`runtime/decoding/compute_buffer.py`), so the results are the same. The graph of a pass of one token
says how much it touches. This is checked before every pass, and lending ends where the pass touches more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from edge_run.base.units import MIB
from edge_run.runtime.decoding.compute_buffer import ComputeBuffer
from edge_run.runtime.graph.flow import Flow
from edge_run.tiers.weights import Weights

logger = logging.getLogger(__name__)

LEAST_LENT_BYTES = 4 * MIB
MARGIN_BYTES = 2 * MIB  # attention scores grow with the text
MOST_EXCESSES = 2


def lendable_bytes(buffer: ComputeBuffer, flow: Flow) -> int:
    """Return the bytes of `buffer` that a pass of one token does not need; 0 for too few to lend.

    flow: the data flow of that pass's graph, which must be the last one that `buffer` was seen in.
    """
    touched = buffer.touched_bytes((storage.address, storage.size_bytes) for storage in flow.storages)
    lendable = buffer.size_bytes - touched - MARGIN_BYTES
    return lendable if lendable >= LEAST_LENT_BYTES else 0


class LentResidency:
    """Lends a part of the compute buffer to weights, and takes it back. Called between passes only.

    buffer: the compute buffer.
    weights: the weights that get the memory.
    lent_chunks: the chunks that stay while they have lent memory.
    lent_bytes: how much of the buffer is lent.
    on_end: runs when lending ends for good.
    is_over: whether lending has ended for good.
    times_lent: how often memory was lent so far.
    """

    def __init__(
        self,
        buffer: ComputeBuffer,
        weights: Weights,
        lent_chunks: Collection[int],
        lent_bytes: int,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._buffer, self._weights, self._lent_chunks, self._lent_bytes = (
            buffer,
            weights,
            lent_chunks,
            lent_bytes,
        )
        self._on_end = on_end
        self._is_lent = self.is_over = False
        self._kept_bytes = self._excesses = self.times_lent = 0

    @property
    def is_lent(self) -> bool:
        """Whether the lent chunks are in memory, or on their way."""
        return self._is_lent

    def before_pass(self, n_tokens: int) -> None:
        """Lend before a pass of one token, and take back before others."""
        if n_tokens != 1 or self.is_over:
            self.take_back()
        elif not self._is_lent and not self._buffer.size_bytes:
            self._end("where llama.cpp computes is not known")  # the last pass ended before its first node
        elif not self._is_lent:
            self._kept_bytes = self._buffer.size_bytes - self._lent_bytes
            self._buffer.drop()
            self._weights.pin(self._lent_chunks)
            self._is_lent, self._excesses = True, 0
            self.times_lent += 1
        else:
            self._look()

    def take_back(self) -> None:
        """Evict the lent chunks, so that all of the buffer may be used."""
        if self._is_lent:
            self._weights.unpin(self._lent_chunks)
            self._is_lent = False

    def _look(self) -> None:
        """Free the buffer where several passes together touched too much; end lending where each of them does."""
        found = self._buffer.resident_bytes()
        self._excesses = self._excesses + 1 if found > self._kept_bytes else 0
        if found > self._kept_bytes:
            self._buffer.drop()
        if self._excesses >= MOST_EXCESSES:
            self._end(f"a pass of one token touches {found} bytes of the buffer, not {self._kept_bytes}")

    def _end(self, why: str) -> None:
        logger.info("%s: lending ends", why)
        self.is_over = True
        self.take_back()
        self._on_end()
