"""What ggml's products of matrices work in."""

from __future__ import annotations

import pytest

from edge_run.runtime.llama import work_buffer
from edge_run.runtime.llama.work_buffer import THREAD_TILE_BYTES, tile_bytes, work_bytes, work_token_bytes
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_header import TensorInfo

F32, Q4_0, Q4_K, IQ4_XS = 0, 2, 12, 23


def matrix(type_id: int, *shape: int) -> TensorInfo:
    return TensorInfo("some.weight", shape, type_id, 0, 0, 1)


def model(*tensors: TensorInfo) -> GgufModel:
    return GgufModel((), tensors, {"general.architecture": "llama"})


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count tiles on any machine."""
    monkeypatch.setattr(work_buffer, "THREAD_TILE_BYTES", 1000)


def test_the_widest_input_counts_for_each_token_of_a_pass() -> None:
    gguf = model(matrix(Q4_0, 700, 10), matrix(F32, 100, 10), matrix(F32, 10_000))
    assert work_token_bytes(gguf) == 800
    assert work_bytes(gguf, 32, 4) == 32 * 800


@pytest.mark.parametrize("type_id", [Q4_K, IQ4_XS])
def test_each_thread_has_a_tile_where_weights_are_unpacked_into_tiles(type_id: int) -> None:
    gguf = model(matrix(Q4_0, 700, 10), matrix(type_id, 70, 10))
    assert work_bytes(gguf, 32, 4) == 32 * 800 + 4 * 1000


def test_a_vector_has_no_tile() -> None:
    assert work_bytes(model(matrix(F32, 100, 10), matrix(Q4_K, 256)), 1, 4) == 200


def test_other_weights_have_no_tiles() -> None:
    assert tile_bytes([matrix(Q4_0, 32, 1), matrix(F32, 32, 1)], 4) == 0
    assert THREAD_TILE_BYTES in (0, 512 * 1024)
