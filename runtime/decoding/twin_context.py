"""Where keys and values lie in a context whose passes nobody follows: found in another one that is made like it.

A callback that follows a pass costs each pass some time, and cannot be taken away again. Two contexts of one shape lay
out their caches alike, so that a cell of the one lies as far from its cache's beginning as that of the other.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import Driver
from edge_run.runtime.llama.context_shape import ContextShape
from edge_run.runtime.llama.model import LlamaContext, LlamaModel
from edge_run.tiers._libc import PAGE
from edge_run.tiers.kv.cells import Cells


def sparse_cells(model: LlamaModel, shape: ContextShape, context: LlamaContext) -> Cells | None:
    """Return the cells of those caches of `context` that take memory as they are written; None where there are none.

    context: made of `model` in `shape`, sparse.
    """
    if not context.sparse_caches:
        return None
    driver = Driver()
    with (
        closing(LlamaContext(model, shape, driver.callback, is_sparse=True)) as twin,
        closing(LocalDecoder(model, twin, driver, shape)) as decoder,
    ):
        decoder.map_graph(notes_nodes=False)
        tensors, caches = driver.take_flow().cells, list(zip(twin.sparse_caches, context.sparse_caches, strict=False))
    if any(theirs[1] != ours[1] for theirs, ours in caches):
        return None
    found = [
        replace(tensor, address=tensor.address - there + here)
        for tensor in tensors
        for (there, length), (here, _) in caches
        if there - PAGE <= tensor.address < there + length  # a cache begins within the page before
    ]
    return Cells(found, PAGE) if found else None
