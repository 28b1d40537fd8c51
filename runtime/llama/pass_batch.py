"""The tokens of one pass, in llama.cpp's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_run.base.closing import Closing
from edge_run.base.protocols import BatchToken
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama._ggml import L


class PassBatch(Closing):
    """A `llama_batch` of at most `n_tokens` tokens, each in at most `n_sequences` sequences. Close it.

    n_outputs: how many of the tokens want logits.

    Its arrays are set in slices: through the pointers in it, number by number, that took microseconds for each token.
    """

    def __init__(self, n_tokens: int, n_sequences: int) -> None:
        self.handle: Any = L.llama_batch_init(n_tokens, 0, n_sequences)
        self._n_most, self.n_outputs = (n_tokens, n_sequences), 0
        self.find_arrays()

    def find_arrays(self) -> None:
        """Write from now on to the arrays that the batch points to."""
        batch, (n_tokens, n_sequences) = self.handle, self._n_most
        self._tokens, self._positions, self._n_sequences, self._wants_logits = (
            ggml.numbers_at(pointer, n_tokens) for pointer in (batch.token, batch.pos, batch.n_seq_id, batch.logits)
        )
        self._sequences = [ggml.numbers_at(batch.seq_id[i], n_sequences) for i in range(n_tokens)]

    def fill(self, tokens: Sequence[BatchToken]) -> None:
        """Let the next pass be of `tokens`, which were checked; ValueError for more than there is room for."""
        n = len(tokens)
        self._tokens[:n] = [token.token for token in tokens]
        self._positions[:n] = [token.position for token in tokens]
        self._n_sequences[:n] = [1 + len(token.branches) for token in tokens]
        self._wants_logits[:n] = [token.wants_logits for token in tokens]
        for sequences, token in zip(self._sequences, tokens, strict=False):
            sequences[0] = token.sequence
            if token.branches:
                sequences[1 : 1 + len(token.branches)] = token.branches
        self.handle.n_tokens, self.n_outputs = n, sum(token.wants_logits for token in tokens)

    def close(self) -> None:
        """Free it. Idempotent."""
        if self.handle is not None:
            L.llama_batch_free(self.handle)
            self.handle = None
