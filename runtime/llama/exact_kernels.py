"""Kernels whose bits do not depend on how many tokens a pass has.

From eight tokens on, llama.cpp multiplies by matrices of K-quants and of their like in tiles, which sum in another
order than its kernels for fewer tokens; in a mixture, from eight tokens that chose the same expert. It leaves alone
what has a kernel of its own, which a public field of the weight says, `extra` (`repacking.py`). What that field says
counts only where the weight's buffer is of a type for such kernels.
"""

from __future__ import annotations

from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.model import LlamaModel

_NONE_OF_ITS_OWN = 1  # no address


def leave_out_tiles(model: LlamaModel) -> None:
    """Have `model` computed without tiles, from the next pass on."""
    for address in ggml.model_tensors(model.handle):
        tensor = ggml.tensor_at(address)
        tensor.extra = tensor.extra or _NONE_OF_ITS_OWN
