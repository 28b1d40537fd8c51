"""The bytes of a grown model: trained weights copied, noise and exact zeros in the same storage type.

Everything comes in pieces of at most `PIECE_BYTES`. Noise is quantised by llama.cpp, as trained weights are, and
repeats a template, so growing costs what writing costs. A block of zero bytes means zeros in every type: its scale is
zero. What is grown to which size is `inflate.py`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.random import Generator, default_rng

from edge_run.devices.host.target_file import read_at
from edge_run.runtime.llama import _ggml
from edge_run.runtime.tools.inflate_source import Role
from edge_run.tiers.gguf_format import TENSOR_TYPES
from edge_run.tiers.gguf_header import TensorInfo

PIECE_BYTES = 4 << 20
ZEROS = memoryview(bytes(1 << 20))
TEMPLATE_BYTES = 1 << 18
NOISE_AT_ONCE = 1 << 16  # numbers that are drawn and quantised at once; a multiple of every block
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
    """Makes noise of any length, as whole blocks of a tensor type. The same `seed`, the same bytes."""

    def __init__(self, seed: int) -> None:
        self._random = default_rng(seed)
        self._noise: dict[int, memoryview] = {}

    def noise(self, type_id: int, size_bytes: int) -> Iterator[Piece]:
        """Yield `size_bytes` bytes of the template for `type_id`, from a random block of it on, over and over."""
        if type_id not in self._noise:
            self._noise[type_id] = _noise_template(type_id, self._random)
        template, block_bytes = self._noise[type_id], TENSOR_TYPES[type_id].block_bytes
        start = int(self._random.integers(len(template) // block_bytes)) * block_bytes
        return _repeat(template, size_bytes, start)


def tensor_pieces(tensor: GrownTensor, file: BinaryIO, filler: Filler) -> Iterator[Piece]:
    """Yield the bytes of `tensor`, whose trained part is read from `file`; use a piece before asking for the next."""
    source, type_id = tensor.source, tensor.source.type_id
    if tensor.is_added and tensor.role in (Role.NOISE, Role.ROWS):
        yield from filler.noise(type_id, tensor.size_bytes)
    elif tensor.is_added and tensor.role in (Role.SILENT, Role.COLUMNS):
        yield from _repeat(ZEROS, tensor.size_bytes, 0)
    elif tensor.size_bytes == source.size_bytes:
        yield from _copy(file, source.offset, source.size_bytes)
    elif tensor.role is Role.ROWS:
        n_experts = math.prod(tensor.shape[2:])
        trained_bytes = source.size_bytes // n_experts
        for expert in range(n_experts):
            yield from _copy(file, source.offset + expert * trained_bytes, trained_bytes)
            yield from filler.noise(type_id, tensor.size_bytes // n_experts - trained_bytes)
    else:
        yield from _widen_columns(tensor, file)


def _widen_columns(tensor: GrownTensor, file: BinaryIO) -> Iterator[Piece]:
    """Yield each row of the source followed by zeros: many rows in a piece, or many pieces in a row."""
    source, n_rows = tensor.source, math.prod(tensor.shape[1:])
    trained_bytes, row_bytes = source.size_bytes // n_rows, tensor.size_bytes // n_rows
    if row_bytes > PIECE_BYTES:
        for row in range(n_rows):
            yield from _copy(file, source.offset + row * trained_bytes, trained_bytes)
            yield from _repeat(ZEROS, row_bytes - trained_bytes, 0)
        return
    rows_per_piece = PIECE_BYTES // row_bytes
    piece = np.zeros((rows_per_piece, row_bytes), np.uint8)
    for row in range(0, n_rows, rows_per_piece):
        count = min(rows_per_piece, n_rows - row)
        trained = read_at(file, source.offset + row * trained_bytes, count * trained_bytes)
        piece[:count, :trained_bytes] = np.frombuffer(trained, np.uint8).reshape(count, trained_bytes)
        yield piece[:count].data.cast("B")


def _copy(file: BinaryIO, offset: int, size_bytes: int) -> Iterator[Piece]:
    for done in range(0, size_bytes, PIECE_BYTES):
        yield read_at(file, offset + done, min(PIECE_BYTES, size_bytes - done))


def _repeat(template: memoryview, size_bytes: int, start: int) -> Iterator[Piece]:
    while size_bytes:
        piece = template[start : start + size_bytes]
        yield piece
        size_bytes, start = size_bytes - len(piece), 0


def _noise_template(type_id: int, random: Generator) -> memoryview:
    """Return about `TEMPLATE_BYTES` of normally distributed numbers with the standard deviation `NOISE_SPREAD`.

    The number of blocks is prime, so that rows that follow each other differ.
    """
    kind = TENSOR_TYPES[type_id]
    blocks = bytearray()
    n_blocks = _prime_up_to(TEMPLATE_BYTES // kind.block_bytes)
    n_values = n_blocks * kind.block_elements
    for done in range(0, n_values, NOISE_AT_ONCE):
        values = random.standard_normal(min(n_values - done, NOISE_AT_ONCE), np.float32) * np.float32(NOISE_SPREAD)
        blocks += _ggml.quantize(type_id, values, kind.size_bytes(values.size)).tobytes()
    return memoryview(bytes(blocks))


def _prime_up_to(most: int) -> int:
    """Return the largest prime that is not above `most`, which is at least 2."""
    return next(n for n in range(most, 1, -1) if all(n % factor for factor in range(2, math.isqrt(n) + 1)))
