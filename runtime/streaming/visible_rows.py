"""The rows that a model's own choice lets an attention look at, so that others need not come from a file.

Some models (`deepseek32`, `glm-dsa`) have an indexer: a small product that says, for each token and layer, which rows
its attention looks at. llama.cpp hides the others by the mask of that attention, and its kernel does not read what is
hidden from all tokens. So the mask says, before the attention is computed, which rows it reads; nothing is changed.
"""

from __future__ import annotations

import numpy as np

from edge_run.runtime.llama import _ggml as ggml
from edge_run.tiers import _libc
from edge_run.tiers.kv.key_bounds import Choice

INDEXER = "attention.indexer.head_count"  # in the metadata of a model that chooses
HIDDEN = np.uint16(0xFC00)  # minus infinity, as a mask of 16 bits has it
_HALF = ggml.TYPE_IDS["f16"]
_MOST_TOKENS = 16  # more look at nearly all rows together, and from 64 on the kernel reads rows in tiles


class VisibleRows:
    """Names the rows that an attention reads, by its mask."""

    def choose(self, address: int) -> Choice | None:
        """Return which rows the attention at `address` reads, whose mask is computed; None: perhaps all."""
        place = ggml.tensor_at(address).src[3]
        if not place:
            return None
        mask = ggml.tensor_at(place)
        n_rows, n_tokens, _, n_streams = mask.ne[:4]
        if mask.type != _HALF or n_tokens * n_streams > _MOST_TOKENS:
            return None
        visible = np.zeros(n_rows, np.bool_)
        for stream in range(n_streams):
            for token in range(n_tokens):
                at = mask.data + stream * mask.nb[3] + token * mask.nb[1]
                visible |= np.frombuffer(_libc.view(at, 2 * n_rows), np.uint16) != HIDDEN
        return visible

    def learn(self, address: int) -> None:
        """Do nothing: there is nothing to learn of rows that are in memory."""
