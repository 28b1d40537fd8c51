"""What ggml's products of matrices work in on the processor: their inputs, converted, and the tiles of each thread.

ggml keeps one buffer of the size that the largest product of its widest pass asked for.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable

from edge_run.base.units import KIB
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_header import TensorInfo

THREAD_TILE_BYTES = 512 * KIB if platform.machine().lower() in ("x86_64", "amd64") else 0
_WHOLE_NUMBERS = frozenset((0, 1, 30))  # f32, f16, bf16: of such weights the inputs stay, or get 2 bytes a number
_TILED = frozenset((10, 11, 12, 13, 14, 16, 17, 18, 19, 21, 22, 23, 29))  # Q2_K to Q6_K, IQ1, IQ2, IQ3, IQ4_XS


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
    return 2 * width if tensor.type_id in _WHOLE_NUMBERS else -(-width * 8 // 7)


def tile_bytes(tensors: Iterable[TensorInfo], threads: int) -> int:
    """Return what so many threads unpack weights of these tensors into: those of some types, on x86."""
    return threads * THREAD_TILE_BYTES if any(tensor.type_id in _TILED for tensor in tensors) else 0


def _matrices(gguf: GgufModel) -> list[TensorInfo]:
    return [tensor for tensor in gguf.tensors if len(tensor.shape) > 1]
