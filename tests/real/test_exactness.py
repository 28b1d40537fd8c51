"""Real models: streamed logits are llama.cpp's, bit for bit, under half the model, which the process keeps to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, ConfigError
from edge_run.base.protocols import BatchToken
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.llama import _ggml
from edge_run.runtime.tools.inflate import inflate
from exactness import run
from in_child import in_child
from real_models import PROMPT, QWEN_DRAFT, TEXTS, RealModel

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

N_DECODED = 16
OPTIONS: dict[str, Any] = {
    "context_tokens": 512,
    "micro_batch_tokens": 32,
    "outputs_per_pass": 32,
    "threads": 2,
    "check_file": False,
}


@in_child
def keep_llama_cpps_logits(path: Path, kept: Path) -> None:
    """Run llama.cpp, all resident, over the prompt and what it would write; keep tokens and logits."""
    engine = Engine.open(path, ModelConfig(backend="llama.cpp", **OPTIONS))
    assert engine.backend.name == "llama.cpp"
    tokens = _ggml.tokenize(engine.model.vocab, PROMPT, True, False)
    assert 55 <= len(tokens) <= 80
    n_prompt, rows = len(tokens), run(engine, tokens, len(tokens))
    for _ in range(N_DECODED):
        tokens.append(int(rows[-1][-1].argmax()))
        rows.append(engine.decoder.decode([BatchToken(tokens[-1], len(tokens) - 1, 0, True)]).copy())
    engine.close()
    np.savez(kept, np.array(tokens), n_prompt, *rows)


@in_child
def compare_streamed_logits(path: Path, kept: Path) -> None:
    """Run the same tokens streamed, under half the model or the least that works, and compare each row's bits."""
    budget = path.stat().st_size // 2
    try:
        engine = Engine.open(path, ModelConfig(memory=budget, backend="edge-run", **OPTIONS))
    except BudgetError as refusal:
        budget = refusal.minimum_bytes
        engine = Engine.open(path, ModelConfig(memory=budget, backend="edge-run", **OPTIONS))
    assert engine.plan.mode == "streamed"
    assert engine.plan.streamed_bytes_per_pass > path.stat().st_size // 10
    with np.load(kept) as file:
        tokens, n_prompt, *wanted = (file[name] for name in file.files)
    found = run(engine, tokens.tolist(), int(n_prompt))
    peak_bytes = engine.memory_use.peak_bytes
    engine.close()
    assert len(found) == len(wanted)
    differing = [i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if not np.array_equal(a, b)]
    assert not differing, f"passes {differing} of {len(wanted)} differ"
    assert np.isfinite(wanted[-1]).all()
    assert np.ptp(wanted[-1]) > 1
    assert peak_bytes <= budget


def name_of(model: RealModel) -> str:
    """Return what a test with `model` is called by."""
    return model.name


@pytest.mark.parametrize("path", TEXTS, ids=name_of, indirect=True)
def test_streamed_logits_are_llama_cpps_bits_within_half_the_model(path: Path, tmp_path: Path) -> None:
    kept = tmp_path / "logits.npz"
    keep_llama_cpps_logits(path=path, kept=kept)
    compare_streamed_logits(path=path, kept=kept)


@pytest.mark.parametrize("path", [QWEN_DRAFT], ids=name_of, indirect=True)
def test_a_model_grown_by_layers_has_the_logits_of_the_small_one(path: Path, tmp_path: Path) -> None:
    """Of four storage types, twice as many layers, streamed under half of what it has grown to."""
    with pytest.raises(ConfigError) as refused:
        inflate(path, tmp_path / "grown.gguf", 1, layers=48)
    grown = inflate(path, tmp_path / "grown.gguf", refused.value.needed_bytes, layers=48)
    kept = tmp_path / "logits.npz"
    keep_llama_cpps_logits(path=path, kept=kept)
    compare_streamed_logits(path=grown, kept=kept)
