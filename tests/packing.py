"""Models for the packer that no llama.cpp has to load: files of numbers, and what a header would say of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_format import F16
from edge_run.tiers.gguf_header import Shard, TensorInfo

N_EXPERTS = 4
HEAD_BYTES = 4096


def trained_like(n_numbers: int, seed: int = 0) -> bytes:
    """Numbers of 16 bits as weights have them, which pack to some 0.85 of their size."""
    return np.random.default_rng(seed).normal(0, 0.02, n_numbers).astype("<f2").tobytes()


def model_of(
    folder: Path, shards: list[list[tuple[int, int]]], *, tail: bytes = b"", type_id: int = F16, seed: int = 0
) -> GgufModel:
    """Write shards of experts: of each tensor the bytes before it, which are no expert's, and its length in numbers.

    tail: what each file ends with.
    """
    files, tensors = [], []
    for number, parts in enumerate(shards):
        data = bytearray(np.random.default_rng(seed + number).bytes(HEAD_BYTES))
        for before, n_numbers in parts:
            data += np.random.default_rng(before + seed).bytes(before)
            content = trained_like(n_numbers, seed + len(tensors))
            shape = (n_numbers // N_EXPERTS, 1, N_EXPERTS)
            tensors.append(TensorInfo(f"blk.{len(tensors)}.exps", shape, type_id, number, len(data), len(content)))
            data += content
        data += tail
        path = folder / f"model-{number}.gguf"
        path.write_bytes(data)
        files.append(Shard(path, len(data), HEAD_BYTES, HEAD_BYTES))
    metadata = {"general.architecture": "x", "x.expert_count": N_EXPERTS}
    return GgufModel(tuple(files), tuple(tensors), metadata)
