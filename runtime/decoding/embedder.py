"""Vectors of texts, from a context of llama.cpp that pools: a pass for several texts, or several for a long one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_run.base.errors import KernelError, option
from edge_run.base.protocols import BatchToken, Logits
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama._ggml import L
from edge_run.runtime.llama.context_shape import ContextShape
from edge_run.runtime.llama.model import LlamaContext, LlamaModel


class Embedder:
    """Computes vectors with a decoder whose context is for embeddings. Not thread-safe.

    pooling: how one vector is made of a text. width: the numbers of a vector.
    """

    def __init__(self, model: LlamaModel, context: LlamaContext, decoder: LocalDecoder, shape: ContextShape) -> None:
        self._context, self._decoder = context, decoder
        self.pooling = shape.pooling
        self.width = model.n_scores if self.pooling == "rank" else model.embedding_width

    def embed(self, texts: Sequence[Sequence[int]]) -> Logits:
        """Return the vectors (rows, width) of texts, given as tokens, that fit one pass, or of one that may be longer.

        There is a row for each text, and for each token where nothing is pooled. The texts are looked at each by
        itself; nothing of them is kept. Raises what `LocalDecoder.decode` raises, and KernelError for vectors that are
        not numbers.
        """
        self._decoder.clear()
        self._decoder.follow(
            [
                BatchToken(token, position, number, wants_logits=True)
                for number, text in enumerate(texts)
                for position, token in enumerate(text)
            ]
        )
        handle = self._context.handle
        if self.pooling == "none":
            rows = [L.llama_get_embeddings_ith(handle, i) for i in range(sum(map(len, texts)))]
        else:
            rows = [L.llama_get_embeddings_seq(handle, number) for number in range(len(texts))]
        if not all(rows):
            other = option("pooling")
            raise KernelError(f"llama.cpp gave no vector (pooling {self.pooling}); give another one with {other}")
        vectors = np.stack([ggml.float_rows(row, self.width) for row in rows])
        if not np.isfinite(vectors).all():
            raise KernelError(
                "embedding: a vector has numbers that are not finite; the weights or the computation are damaged; copy "
                "or download the model again"
            )
        return vectors
