"""Vectors of texts as llama.cpp computes them without us, to be compared bit for bit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import llama_cpp.llama_cpp as low
import numpy as np
from numpy.typing import NDArray

_RANK = 4


def stock_vectors(
    path: Path,
    texts: Sequence[Sequence[int]],
    width: int,
    *,
    pooling: int = -1,
    sequences: int = 1,
    pass_tokens: int = 0,
    flash_attention: int = -1,
    threads: int = 1,
) -> NDArray[np.float32]:
    """Return a row for each of `texts`, which are computed together, as many as there are `sequences`.

    width: the tokens of a batch at most. pooling: -1 is the file's own. pass_tokens: of one pass; 0: the whole batch.
    """
    model_params = low.llama_model_default_params()
    model_params.use_extra_bufts, model_params.n_gpu_layers = False, 0
    model = low.llama_model_load_from_file(os.fsencode(path), model_params)
    assert model
    params = low.llama_context_default_params()
    width += -width % sequences  # it wants a part of each pass for each sequence
    params.n_ctx = params.n_batch = width
    params.n_ubatch, params.n_seq_max, params.kv_unified = pass_tokens or width, sequences, sequences > 1
    params.embeddings, params.pooling_type, params.flash_attn_type = True, pooling, flash_attention
    params.n_threads = params.n_threads_batch = threads
    context = low.llama_init_from_model(model, params)
    assert context
    is_rank = low.llama_pooling_type(context) == _RANK
    columns = low.llama_model_n_cls_out(model) if is_rank else low.llama_model_n_embd_out(model)
    rows = []
    for first in range(0, len(texts), sequences):
        together = texts[first : first + sequences]
        low.llama_memory_clear(low.llama_get_memory(context), True)
        batch = low.llama_batch_init(sum(map(len, together)), 0, 1)
        places = [(token, position, i) for i, text in enumerate(together) for position, token in enumerate(text)]
        batch.n_tokens = len(places)
        for i, (token, position, sequence) in enumerate(places):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, 1
            batch.seq_id[i][0] = sequence
        assert low.llama_decode(context, batch) == 0
        if low.llama_pooling_type(context) == 0:
            found = [low.llama_get_embeddings_ith(context, i) for i in range(len(places))]
        else:
            found = [low.llama_get_embeddings_seq(context, i) for i in range(len(together))]
        rows += [np.ctypeslib.as_array(row, (columns,)).copy() for row in found]
        low.llama_batch_free(batch)
    low.llama_free(context)
    low.llama_model_free(model)
    return np.stack(rows)
