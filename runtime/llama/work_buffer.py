"""What ggml's products of matrices work in on the processor: their inputs, converted, and the tiles of each thread.

ggml keeps one buffer of the size that the largest product of its widest pass asked for.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable

from edge_run.base.units import KIB
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_format import TENSOR_TYPES
from edge_run.tiers.gguf_header import TensorInfo

THREAD_TILE_BYTES = 512 * KIB if platform.machine().lower() in ("x86_64", "amd64") else 0
_UNQUANTISED = frozenset(("F32", "F16", "BF16"))  # of such weights the inputs stay, or get 2 bytes a number
_TILED = frozenset(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"))
_TILED |= {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"}


def work_bytes(gguf: GgufModel, micro_batch_tokens: int, threads: int) -> int:
    """Return what products with the matrices of a model take in passes of so many tokens, at most."""
    return micro_batch_tokens * work_token_bytes(gguf) + tile_bytes(_matrices(gguf), threads)


def work_token_bytes(gguf: GgufModel) -> int:
    """Return what each token of a pass takes of it."""
    experts = gguf.used_experts
    return max((converted_bytes(tensor, experts) for tensor in _matrices(gguf)), default=0)


def converted_bytes(tensor: TensorInfo, experts: int) -> int:
    """Return what a token's converted input for `tensor` takes, where it uses so many `experts`.

    For quantised weights the input is converted to blocks with 8 bits a number; the largest of these (Q8_K) take 1.14
    bytes a number.
    """
    width = tensor.shape[0]
    if len(tensor.shape) > 2:
        return 2 * width * experts
    return 2 * width if _type_name(tensor) in _UNQUANTISED else -(-width * 8 // 7)


def tile_bytes(tensors: Iterable[TensorInfo], threads: int) -> int:
    """Return what so many threads unpack weights of these tensors into: those of some types, on x86."""
    return threads * THREAD_TILE_BYTES if any(_type_name(tensor) in _TILED for tensor in tensors) else 0


def _matrices(gguf: GgufModel) -> list[TensorInfo]:
    return [tensor for tensor in gguf.tensors if len(tensor.shape) > 1]


def _type_name(tensor: TensorInfo) -> str:
    return TENSOR_TYPES[tensor.type_id].name
