"""The mask that all layers share, where each hides rows of its own from one token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_run.runtime.streaming import chosen_rows
from edge_run.runtime.streaming.chosen_rows import ChosenRows
from edge_run.runtime.streaming.visible_rows import HIDDEN
from edge_run.tiers.kv.cells import PAGE_ROWS

N_ROWS, KEEP_ROWS, N_CHANNELS = 8 * PAGE_ROWS, 4 * PAGE_ROWS, 8
HALF = chosen_rows.ggml.TYPE_IDS["f16"]


def tensor(array: np.ndarray[Any, Any], ne: tuple[int, ...], nb: tuple[int, ...], kind: int) -> SimpleNamespace:
    return SimpleNamespace(data=array.ctypes.data, ne=ne, nb=nb, type=kind, view_src=0, array=array)


def test_a_layer_that_chooses_nothing_looks_at_what_the_layer_before_has_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one whose keys changed while they were in a file: nothing is known of them."""
    random = np.random.default_rng(0)
    query = random.standard_normal((1, N_CHANNELS)).astype(np.float32)
    mask = np.zeros(N_ROWS, np.uint16)
    tensors: dict[int, SimpleNamespace] = {
        1: tensor(query, (N_CHANNELS, 1, 1), (4, 4 * N_CHANNELS, 4 * N_CHANNELS), 0),
        2: tensor(mask, (N_ROWS, 1), (2, 2 * N_ROWS), HALF),
    }
    row_bytes = 2 * N_CHANNELS
    for layer in (10, 20):
        keys = random.standard_normal((N_ROWS, N_CHANNELS)).astype(np.float16)
        tensors[layer + 1] = tensor(keys, (N_CHANNELS, N_ROWS, 1), (2, row_bytes, row_bytes), HALF)
        tensors[layer] = SimpleNamespace(src=(1, layer + 1, 0, 2))
    monkeypatch.setattr(chosen_rows.ggml, "tensor_at", tensors.__getitem__)
    chooser = ChosenRows(KEEP_ROWS, "pages", is_asked=True)
    for layer in (10, 20):
        assert chooser.choose(layer) is None
        chooser.learn(layer)
    chooser._bounds[tensors[21].data].forget(0)
    for _ in range(2):
        chosen = chooser.choose(10)
        assert chosen is not None
        assert 0 < chosen.sum() <= KEEP_ROWS
        assert np.array_equal(mask != HIDDEN, chosen)
        assert chooser.choose(20) is None
        assert (mask != HIDDEN).all()
