"""The bytes of a grown model: trained weights copied, noise and exact zeros in the same storage type.

Everything comes in pieces of at most `PIECE_BYTES`. Noise repeats a template, so growing costs what writing costs.
What is grown to which size is `inflate.py`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from edge_run.base.errors import ModelFileError
from edge_run.runtime.tools.inflate_source import Role
from edge_run.tiers.gguf import TensorInfo
from edge_run.tiers.gguf_format import F16, F32, Q4_0, Q8_0, TENSOR_TYPES

PIECE_BYTES = 4 << 20
TEMPLATE_BLOCKS = {F32: 262_139, F16: 524_287, Q4_0: 58_237, Q8_0: 30_841}  # about 1 MiB; prime, so rows differ
NOISE_SPREAD = 0.02  # the standard deviation that trained weights are usually drawn with

Piece = bytes | memoryview


@dataclass(frozen=True, slots=True)
class GrownTensor:
    """A tensor to write: like `source`, but of another name and `shape`, and by `role` where the layer `is_added`.

    `role` is None for tensors outside the layers, which are copied.
    """

    name: str
    shape: tuple[int, ...]
    source: TensorInfo
    role: Role | None
    is_added: bool

    @property
    def size_bytes(self) -> int:
        """The tensor's bytes, padding not counted."""
        return TENSOR_TYPES[self.source.type_id].size_bytes(math.prod(self.shape))


class Filler:
    """Makes noise and zeros of any length, as whole blocks of a tensor type. The same `seed`, the same bytes."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._noise: dict[int, memoryview] = {}
        self._zeros: dict[int, memoryview] = {}

    def noise(self, type_id: int, size_bytes: int) -> Iterator[Piece]:
        """Yield `size_bytes` bytes of the template for `type_id`, from a random block of it on, over and over."""
        if type_id not in self._noise:
            self._noise[type_id] = _noise_template(type_id, self._random)
        start = int(self._random.integers(TEMPLATE_BLOCKS[type_id])) * TENSOR_TYPES[type_id].block_bytes
        return _repeat(self._noise[type_id], size_bytes, start)

    def zeros(self, type_id: int, size_bytes: int) -> Iterator[Piece]:
        """Yield `size_bytes` bytes that mean exact zeros."""
        return _repeat(self._zero_template(type_id), size_bytes, 0)

    def _zero_template(self, type_id: int) -> memoryview:
        if type_id not in self._zeros:
            self._zeros[type_id] = memoryview(zero_block(type_id) * TEMPLATE_BLOCKS[type_id])
        return self._zeros[type_id]


def zero_block(type_id: int) -> bytes:
    """Return one block of exact zeros, as quantising zeros gives it (Q4_0 stores each number plus 8)."""
    return bytes(2) + b"\x88" * 16 if type_id == Q4_0 else bytes(TENSOR_TYPES[type_id].block_bytes)


def tensor_pieces(tensor: GrownTensor, file: BinaryIO, filler: Filler) -> Iterator[Piece]:
    """Yield the bytes of `tensor`, whose trained part is read from `file`; use a piece before asking for the next."""
    source, type_id = tensor.source, tensor.source.type_id
    if tensor.is_added and tensor.role in (Role.NOISE, Role.ROWS):
        yield from filler.noise(type_id, tensor.size_bytes)
    elif tensor.is_added and tensor.role in (Role.SILENT, Role.COLUMNS):
        yield from filler.zeros(type_id, tensor.size_bytes)
    elif tensor.size_bytes == source.size_bytes:
        yield from _copy(file, source.offset, source.size_bytes)
    elif tensor.role is Role.ROWS:
        n_experts = math.prod(tensor.shape[2:])
        trained_bytes = source.size_bytes // n_experts
        for expert in range(n_experts):
            yield from _copy(file, source.offset + expert * trained_bytes, trained_bytes)
            yield from filler.noise(type_id, tensor.size_bytes // n_experts - trained_bytes)
    else:
        yield from _widen_columns(tensor, file, filler)


def _widen_columns(tensor: GrownTensor, file: BinaryIO, filler: Filler) -> Iterator[Piece]:
    """Yield each row of the source followed by zeros: many rows in a piece, or many pieces in a row."""
    source, n_rows = tensor.source, math.prod(tensor.shape[1:])
    trained_bytes, row_bytes = source.size_bytes // n_rows, tensor.size_bytes // n_rows
    if row_bytes > PIECE_BYTES:
        for row in range(n_rows):
            yield from _copy(file, source.offset + row * trained_bytes, trained_bytes)
            yield from filler.zeros(source.type_id, row_bytes - trained_bytes)
        return
    rows_per_piece = PIECE_BYTES // row_bytes
    block = np.frombuffer(zero_block(source.type_id), np.uint8)
    piece = np.tile(block, (rows_per_piece, row_bytes // len(block)))
    for row in range(0, n_rows, rows_per_piece):
        count = min(rows_per_piece, n_rows - row)
        trained = _read(file, source.offset + row * trained_bytes, count * trained_bytes)
        piece[:count, :trained_bytes] = np.frombuffer(trained, np.uint8).reshape(count, trained_bytes)
        yield piece[:count].data.cast("B")


def _copy(file: BinaryIO, offset: int, size_bytes: int) -> Iterator[Piece]:
    for done in range(0, size_bytes, PIECE_BYTES):
        yield _read(file, offset + done, min(PIECE_BYTES, size_bytes - done))


def _read(file: BinaryIO, offset: int, size_bytes: int) -> bytes:
    file.seek(offset)
    piece = file.read(size_bytes)
    if len(piece) < size_bytes:
        raise ModelFileError(
            f"{file.name}: ended at byte {offset + len(piece):,}, {offset + size_bytes:,} are needed; it changed while "
            "it was read: try again",
            found_bytes=offset + len(piece),
            needed_bytes=offset + size_bytes,
        )
    return piece


def _repeat(template: memoryview, size_bytes: int, start: int) -> Iterator[Piece]:
    while size_bytes:
        piece = template[start : start + size_bytes]
        yield piece
        size_bytes, start = size_bytes - len(piece), 0


def _noise_template(type_id: int, random: np.random.Generator) -> memoryview:
    """Return `TEMPLATE_BLOCKS` blocks of numbers with the standard deviation `NOISE_SPREAD`.

    A quantised block has uniform integers (-8 to 7, or -127 to 127) and a scale that varies by half.
    """
    n_blocks = TEMPLATE_BLOCKS[type_id]
    if type_id in (F32, F16):
        dtype = "<f4" if type_id == F32 else "<f2"
        return random.normal(0, NOISE_SPREAD, n_blocks).astype(dtype).data.cast("B")
    blocks: npt.NDArray[np.uint8] = np.empty((n_blocks, TENSOR_TYPES[type_id].block_bytes), np.uint8)
    integer_spread = math.sqrt((16**2 - 1) / 12) if type_id == Q4_0 else math.sqrt((255**2 - 1) / 12)
    scales = random.uniform(0.5, 1.5, (n_blocks, 1)) * NOISE_SPREAD / integer_spread
    blocks[:, :2] = scales.astype("<f2").view(np.uint8)
    if type_id == Q4_0:
        blocks[:, 2:] = random.integers(0, 256, (n_blocks, 16), np.uint8)
    else:
        blocks[:, 2:] = random.integers(-127, 128, (n_blocks, 32), np.int8).view(np.uint8)
    return blocks.data.cast("B")
