"""What is known of a model before it is opened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.config import ModelConfig
from edge_run.runtime.planning.prepared import Prepared


@pytest.mark.parametrize(("is_mixture", "on_gpu", "found"), [(False, False, 100), (True, False, 0), (False, True, 0)])
def test_weights_of_a_draft_model_are_lent_where_they_can_leave(is_mixture: bool, on_gpu: bool, found: int) -> None:
    gguf: Any = SimpleNamespace(is_mixture=is_mixture)
    draft: Any = SimpleNamespace(idle_bytes=100)
    offload: Any = SimpleNamespace() if on_gpu else None
    prepared = Prepared(gguf, ModelConfig(), 1 << 30, draft=draft, draft_offload=offload)
    assert prepared.draft_idle_bytes == found
    assert Prepared(gguf, ModelConfig(), 1 << 30).draft_idle_bytes == 0
