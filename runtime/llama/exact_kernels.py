"""Kernels whose bits do not depend on how many tokens a pass has.

From eight tokens on, llama.cpp multiplies by matrices of K-quants and of their like in tiles, which sum in another
order than its kernels for fewer tokens; in a mixture, from eight tokens that chose the same expert. It leaves alone
what has a kernel of its own, which a public field of the weight says, `extra` (`repacking.py`). What that field says
counts only where the weight's buffer is of a type for such kernels.

Of those some sum in another order too, where they have four tokens or more: that of Q4_K does, on x86. Which ones is
tried on a few rows.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_run.base.errors import KernelError, NotSupported, option
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.holdings import repacking_bytes
from edge_run.runtime.llama.model import LlamaModel
from edge_run.runtime.llama.repacking import RepackedWeight, Repacking
from edge_run.tiers.gguf_format import F32, TENSOR_TYPES

_NONE_OF_ITS_OWN = 1  # no address
_TRIED_TOKENS = (36, 7, 3)  # kernels take them by 16, by 4 and one by one; beside these, two at a time
_TENSORS, _NODES = 4, 4

_Floats = npt.NDArray[np.float32]


def leave_out_tiles(model: LlamaModel) -> None:
    """Have `model` computed without tiles, from the next pass on.

    Raises NotSupported where llama.cpp has repacked a weight for a kernel whose bits depend on the width of passes.
    """
    for address in ggml.model_tensors(model.handle):
        tensor = ggml.tensor_at(address)
        if tensor.extra and not is_kernel_even(tensor.type, tuple(tensor.ne[:3]), by_expert=tensor.ne[2] > 1):
            name = ggml.tensor_name(address).decode("utf-8", "replace")
            raise NotSupported(
                f"{model.path}: exact: llama.cpp's own loader repacks {name} for a kernel whose results depend on how "
                f"many tokens a pass has; leave out {option('repack', 'on')}"
            )
        tensor.extra = tensor.extra or _NONE_OF_ITS_OWN


@functools.cache
def is_kernel_even(type_id: int, shape: tuple[int, ...], *, by_expert: bool) -> bool | None:
    """Return whether the repacked kernel of such weights gives a token the same bits beside however many others.

    None where they have no such kernel here. shape: of the weight, (row elements, rows, experts). by_expert: as of
    `Repacking.kernel`.
    """
    repacking = Repacking()
    try:
        with ggml.log.listening(lambda line: None):  # a line for each slice that is repacked
            kernel = repacking.kernel(type_id, shape, by_expert=by_expert)
        return _is_even_by(type_id, shape[0], kernel.rows_together, by_expert=by_expert) if kernel else None
    finally:
        repacking.close()


@functools.cache
def _is_even_by(type_id: int, row_elements: int, rows_together: int, *, by_expert: bool) -> bool:
    """Try as many rows as the kernel takes together: weights of however many rows have the same one."""
    few, repacking = (row_elements, rows_together, 2 if by_expert else 1), Repacking()
    try:
        with ggml.log.listening(lambda line: None):
            weight = repacking.describe(type_id, few, by_expert=by_expert)
            return weight is not None and _is_even(weight, type_id, few, by_expert=by_expert)
    finally:
        repacking.close()


def _is_even(weight: RepackedWeight, type_id: int, shape: tuple[int, int, int], *, by_expert: bool) -> bool:
    row_elements, rows, experts = shape
    values = _numbers(row_elements * rows * experts)
    content = ggml.quantize(type_id, values, TENSOR_TYPES[type_id].size_bytes(len(values)))
    copy = np.zeros(repacking_bytes(weight.group_bytes), np.uint8)
    weight.repack(content.ctypes.data, len(content), copy.ctypes.data)
    tokens = _numbers(max(_TRIED_TOKENS) * row_elements).reshape(-1, row_elements)
    backend = ggml.cpu_backend(1)  # OpenMP would keep more threads, of which passes of other threads take account
    try:

        def product(part: _Floats) -> _Floats:
            return _product(backend, ggml.tensor_at(weight.tensor), content, part, by_expert=by_expert)

        pairs = np.concatenate([product(tokens[i : i + 2]) for i in range(0, len(tokens), 2)])
        return all(product(tokens[:n]).tobytes() == pairs[:n].tobytes() for n in _TRIED_TOKENS)
    finally:
        ggml.functions().ggml_backend_free(backend)


def _numbers(count: int) -> _Floats:
    """Return random numbers from -1 to 1; NumPy's own take long to load."""
    drawn = np.frombuffer(random.Random(count).randbytes(4 * count), np.int32)
    return np.multiply(drawn, 2.0**-31, dtype=np.float32)


def _product(backend: int, weight: Any, content: npt.NDArray[np.uint8], tokens: _Floats, *, by_expert: bool) -> _Floats:
    """Return the products of `tokens`, (tokens, row elements), with the rows of `weight` that lie in `content`."""
    functions, context = ggml.functions(), ggml.describing_context(_TENSORS, _NODES)
    n_tokens, row_elements = tokens.shape
    found = np.empty((n_tokens, weight.ne[1]), np.float32)
    chosen = np.zeros(n_tokens, np.int32)
    try:
        matrix = functions.ggml_new_tensor_3d(context, weight.type, *weight.ne[:3])
        ggml.tensor_at(matrix).buffer, ggml.tensor_at(matrix).extra = weight.buffer, weight.extra
        if by_expert:
            inputs = functions.ggml_new_tensor_3d(context, F32, row_elements, 1, n_tokens)
            ids = functions.ggml_new_tensor_2d(context, ggml.I32, 1, n_tokens)
            ggml.tensor_at(ids).data = chosen.ctypes.data
            result = functions.ggml_mul_mat_id(context, matrix, inputs, ids)
        else:
            inputs = functions.ggml_new_tensor_2d(context, F32, row_elements, n_tokens)
            result = functions.ggml_mul_mat(context, matrix, inputs)
        for tensor, memory in ((matrix, content), (inputs, tokens), (result, found)):
            ggml.tensor_at(tensor).data = memory.ctypes.data
        graph = functions.ggml_new_graph_custom(context, _NODES, False)
        functions.ggml_build_forward_expand(graph, result)
        if status := functions.ggml_backend_graph_compute(backend, graph):
            raise KernelError(f"ggml failed to compute with a few rows of repacked weights ({status})")
    finally:
        functions.ggml_free(context)
    return found
