"""A real model and its real draft: with guesses of every width the tokens are those of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eager import Eager
from edge_run.base.config import ModelConfig
from edge_run.base.units import MIB
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation import speculation_setup
from edge_run.runtime.generation.speculation_setup import open_session
from edge_run.runtime.llama import _ggml
from in_child import in_child
from real_models import PROMPT, QWEN, QWEN_DRAFT

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

N_TOKENS = 32
OPTIONS: dict[str, Any] = {"context_tokens": 512, "micro_batch_tokens": 32, "threads": 2, "draft_tokens": 15}


def continued(path: Path, **options: Any) -> tuple[list[int], list[float], Any]:
    """Return the likeliest continuation, by how much each token was the best, and what speculation did."""
    engine = Engine.open(path, ModelConfig(**OPTIONS, **options))
    assert engine.plan.mode == "streamed"
    session = open_session(engine)
    logits, _ = session.feed(_ggml.tokenize(engine.model.vocab, PROMPT, True, False))
    tokens, gaps = [], []
    for _ in range(N_TOKENS):
        second, best = np.partition(logits, -2)[-2:]
        gaps.append(float(best - second))
        tokens.append(int(logits.argmax()))
        logits = session.step(tokens[-1])
    speculation = session.speculation()
    assert engine.memory_use.peak_bytes <= engine.budget_bytes
    engine.close()
    return tokens, gaps, speculation


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "usual"])
@pytest.mark.parametrize("files", [(QWEN, QWEN_DRAFT)], ids=["qwen"], indirect=True)
@in_child
def test_guesses_change_no_token(files: list[Path], is_exact: bool) -> None:
    """Nor do they without --exact, but where the two best tokens are closer than the noise between widths."""
    speculation_setup.WidthControl = Eager  # type: ignore[misc]
    path, draft = files
    budget = draft.stat().st_size + path.stat().st_size // 2 + 200 * MIB
    plain, gaps, _ = continued(path, memory=path.stat().st_size // 2, speculate="off", exact=is_exact)
    guessed, _, speculation = continued(path, memory=budget, draft=draft, exact=is_exact)
    assert speculation.accepted > 0
    assert max(map(int, speculation.widths)) > 2
    differing = [i for i, (a, b) in enumerate(zip(plain, guessed, strict=True)) if a != b]
    if is_exact:
        assert not differing
    elif differing:  # a near tie; what follows is another text
        assert gaps[differing[0]] <= speculation.noise
