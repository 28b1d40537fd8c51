"""Models with a table of learned positions: no text is longer than that, whatever the context has room for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run import ConfigError, EdgeRunError, Model, NotSupported
from edge_run.base.config import ModelConfig
from edge_run.runtime.inspection.draft_file import DraftFile
from edge_run.tiers.gguf import read_gguf
from in_child import in_child
from tiny_models import N_VOCAB, make_model, make_trained_on

POSITIONS = 300  # llama.cpp has cells for 512 tokens
OPTIONS: dict[str, Any] = {"micro_batch_tokens": 64, "threads": 1, "check_file": False}
TEXT = np.random.default_rng(0).integers(1, N_VOCAB, 400).tolist()


def short(folder: Path) -> Path:
    return make_trained_on(POSITIONS, "gpt2", folder)


@pytest.mark.parametrize("options", [{}, {"context_tokens": POSITIONS}, {"context_tokens": 512, "sequences": 2}])
@in_child
def test_a_text_ends_where_the_table_does(options: dict[str, Any], tmp_path: Path) -> None:
    for backend in ("edge-run", "llama.cpp"):
        with Model(short(tmp_path), **OPTIONS, **options, backend=backend) as model:
            answer = model.generate(TEXT[:200], max_tokens=150, ignore_eos=True).result()
            assert answer.finish_reason == "context", (answer.finish_reason, answer.completion_tokens)
            assert answer.completion_tokens in (POSITIONS - 200, POSITIONS - 199)  # the last one is not read
            with pytest.raises(EdgeRunError, match="300"):
                model.generate(TEXT, max_tokens=1).result()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_tokens": 4096}, "learned positions for 300 tokens; give context_tokens=300 or less"),
        ({"context_tokens": 301, "embeddings": True, "pooling": "last"}, "learned positions for 300 tokens"),
        ({"context_tokens": 601, "sequences": 2}, "300 tokens, and 2 texts have 600; give context_tokens=600 or less"),
    ],
)
def test_a_longer_context_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Model(short(tmp_path), **OPTIONS, **options)


@in_child
def test_vectors_of_longer_texts_are_refused(tmp_path: Path) -> None:
    with Model(short(tmp_path), **OPTIONS, embeddings=True, pooling="last") as model:
        assert model.embed([TEXT[:POSITIONS]]).vectors.shape[0] == 1
        with pytest.raises(EdgeRunError, match="300"):
            model.embed([TEXT[: POSITIONS + 1]])


@in_child
def test_a_draft_follows_texts_as_far_as_its_table_goes(tmp_path: Path) -> None:
    path, draft = make_model("llama", tmp_path), short(tmp_path)
    config = ModelConfig(**OPTIONS, context_tokens=1024, draft=draft)
    assert DraftFile.read(draft, config, read_gguf(path), is_tried=False).context_tokens == 256
    with Model(path, **OPTIONS, context_tokens=1024, draft=draft, speculate="draft") as model:
        assert model.generate(TEXT[:200], max_tokens=400, ignore_eos=True).result().completion_tokens == 400


def test_a_draft_model_with_too_short_a_table_is_refused(tmp_path: Path) -> None:
    path = make_trained_on(200, "gpt2", tmp_path)
    with pytest.raises(NotSupported, match=r"learned positions for 200 tokens, 256 are needed"):
        DraftFile.read(path, ModelConfig(check_file=False), read_gguf(path), is_tried=False)
