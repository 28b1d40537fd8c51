"""Weights that readers repack, read in pieces, are what llama.cpp makes of them as wholes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from edge_run.runtime.decoding.repacked_source import RepackedSource, RepackRooms
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.repacking import RepackedWeight, Repacking, types_with_kernels
from edge_run.tiers import _libc
from edge_run.tiers._libc import PAGE
from edge_run.tiers.gguf_format import TENSOR_TYPES
from edge_run.tiers.source import SourceFile

TYPES = [type_id for type_id, kind in TENSOR_TYPES.items() if kind.name in types_with_kernels()]
IDS = [TENSOR_TYPES[type_id].name for type_id in TYPES]
SHAPES = ((512, 64), (256, 192), (256, 129), (256, 64, 3))  # 129 rows are no whole groups; the last has experts
ALIGNMENT_BYTES = 32  # of weights in a file


@dataclass(frozen=True)
class Stored:
    """A weight in a file: its type, its shape, where it begins, and its bytes there."""

    type_id: int
    shape: tuple[int, ...]
    offset: int
    content: bytes


def store(path: Path, type_id: int) -> list[Stored]:
    """Write weights of a type, one behind the other, none of which begins with a page."""
    random, stored, content = np.random.default_rng(type_id), list[Stored](), bytearray(ALIGNMENT_BYTES)
    for shape in SHAPES:
        size_bytes = TENSOR_TYPES[type_id].size_bytes(shape[0]) * int(np.prod(shape[1:]))
        stored.append(Stored(type_id, shape, len(content), random.bytes(size_bytes)))
        content += stored[-1].content + random.bytes(-size_bytes % ALIGNMENT_BYTES + ALIGNMENT_BYTES)
    path.write_bytes(content)
    return stored


def repacked_by_llama(weight: Stored) -> bytes:
    """Return the bytes of a weight in a buffer that llama.cpp has repacked it to, as its own loader does."""
    functions = ggml.functions()
    (kind,) = (kind for kind in ggml.repacked_buffer_types() if ggml.buffer_type_name(kind) == "CPU_REPACK")
    context = ggml.describing_context(1, 1)
    row_elements, rows, experts = (*weight.shape, 1)[:3]
    tensor = functions.ggml_new_tensor_3d(context, weight.type_id, row_elements, rows, experts)
    buffer = functions.ggml_backend_buft_alloc_buffer(kind, len(weight.content))
    try:
        assert functions.ggml_backend_tensor_alloc(buffer, tensor, functions.ggml_backend_buffer_get_base(buffer)) == 0
        functions.ggml_backend_tensor_set(tensor, weight.content, 0, len(weight.content))
        return ctypes.string_at(ggml.tensor_at(tensor).data, len(weight.content))
    finally:
        functions.ggml_backend_buffer_free(buffer)
        functions.ggml_free(context)


@contextmanager
def opened(path: Path, weights: Sequence[tuple[int, RepackedWeight]]) -> Iterator[RepackedSource]:
    rooms = RepackRooms(max(weight.group_bytes for _, weight in weights))
    with closing(rooms), closing(SourceFile(path)) as file:
        yield RepackedSource(file, weights, rooms)


def read_in_pieces(source: RepackedSource, bounds: Sequence[int]) -> bytes:
    """Return what is read of a file from one of the `bounds` to the next, the last piece first."""
    size_bytes = bounds[-1]
    memory = _libc.map_anonymous(size_bytes)
    try:
        for start, stop in reversed(list(itertools.pairwise(bounds))):
            assert source.read_into(memory + start, stop - start, start) >= min(stop, source.size_bytes) - start
        return bytes(_libc.view(memory, source.size_bytes))
    finally:
        _libc.unmap(memory, size_bytes)


@pytest.mark.skipif(not TYPES, reason="no kernel for repacked weights on this processor")
@pytest.mark.parametrize("type_id", TYPES, ids=IDS)
def test_pieces_are_what_llama_makes_of_wholes(type_id: int, tmp_path: Path) -> None:
    path, repacking, weights = tmp_path / "weights", Repacking(), list[tuple[int, RepackedWeight]]()
    stored = store(path, type_id)
    expected = bytearray(path.read_bytes())
    with ggml.log.listening(lambda line: None), closing(repacking):  # a line for each slice that is repacked
        for one in stored:
            if weight := repacking.describe(type_id, one.shape, by_expert=len(one.shape) == 3):
                weights.append((one.offset, weight))
                expected[one.offset : one.offset + len(one.content)] = repacked_by_llama(one)
        assert bytes(expected) != path.read_bytes()
        assert {one.shape for one in stored if one.offset not in dict(weights)} <= {(256, 129), (256, 64, 3)}
        last = -(-len(expected) // PAGE) * PAGE
        every_page = range(0, last + 1, PAGE)
        draw = np.random.default_rng(1)
        some = sorted({0, last, *draw.choice(every_page[1:-1], len(every_page) // 3, replace=False).tolist()})
        with opened(path, weights) as source:
            for bounds in ([0, last], every_page, some):
                assert read_in_pieces(source, bounds) == expected, f"read from {list(bounds)}"
