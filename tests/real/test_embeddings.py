"""A real encoder: streamed under about half of it, its vectors are llama.cpp's, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_run import Model
from in_child import in_child
from real_models import NOMIC
from stock_embeddings import stock_vectors

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

LONGEST = 256
TEXTS = ["search_query: who ran?", "search_document: " + "A fox ran through the snow. " * 30, "fox"]


@in_child
def compare(path: Path) -> None:
    """Streamed first, as llama.cpp alone holds all of the model."""
    budget = path.stat().st_size
    with Model(path, memory=budget, context_tokens=LONGEST, threads=2, check_file=False) as model:
        found = model.embed(TEXTS, normalize=False)
        texts = model.text_tokens(TEXTS).tokens
    assert found.plan.mode == "streamed"
    assert found.plan.streamed_bytes_per_batch > found.plan.model_bytes // 4
    assert found.memory.peak_bytes <= budget
    assert np.array_equal(found.vectors, stock_vectors(path, texts, LONGEST, threads=2))


@pytest.mark.parametrize("path", [NOMIC], ids=lambda model: model.name, indirect=True)
def test_vectors_of_an_encoder(path: Path) -> None:
    compare(path=path)
