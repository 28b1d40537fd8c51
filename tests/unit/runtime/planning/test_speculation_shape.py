"""Which contexts have room for guesses, and which are refused it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edge_run.base.config import ModelConfig
from edge_run.runtime.planning.speculation_shape import (
    RECURRENT,
    ROLLBACK_TOKENS,
    ROLLING_BACK,
    speculation_config,
)


class Gguf:
    """A model file of which only the architecture matters."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture

    def value(self, key: str) -> None:
        return None


def shaped(architecture: str, **options: Any) -> ModelConfig:
    gguf: Any = Gguf(architecture)
    return speculation_config(ModelConfig(**{"context_tokens": 256, "micro_batch_tokens": 32, **options}), gguf)


def test_what_rolls_back_has_state() -> None:
    assert ROLLING_BACK < RECURRENT


@pytest.mark.parametrize("narrow", ["micro_batch_tokens", "context_tokens"])
def test_a_pass_has_room_for_more_than_is_cut(narrow: str) -> None:
    """llama.cpp ends the process where it has not."""
    for width in range(1, 10):
        for draft_tokens in range(1, 17):
            found = shaped("lfm2", speculate="ngram", draft_tokens=draft_tokens, **{narrow: width})
            assert found.rollback_tokens == max(0, min(ROLLBACK_TOKENS, draft_tokens, width - 2))
            assert found.outputs_per_pass == found.rollback_tokens + 1
        given = shaped("lfm2", rollback_tokens=ROLLBACK_TOKENS, **{narrow: width})
        assert given.rollback_tokens == max(0, min(ROLLBACK_TOKENS, width - 2))


@pytest.mark.parametrize(
    "options",
    [
        {"exact": True},
        {"sequences": 2},
        {"sequences": 2, "kv_spill": "on"},
        {"prompt_cache": "on"},
        {"gpu_memory": "1GiB"},
    ],
    ids=str,
)
@pytest.mark.parametrize("speculate", ["ngram", "off"])
def test_state_that_is_not_cut_takes_no_memory_for_it(options: dict[str, Any], speculate: str) -> None:
    found = shaped("lfm2", speculate=speculate, rollback_tokens=3, **options)
    assert (found.rollback_tokens, found.branches, found.outputs_per_pass) == (0, 0, 1)
    assert shaped("lfm2", rollback_tokens=3).rollback_tokens == 3
    assert shaped("mamba", rollback_tokens=3).rollback_tokens == 0


@pytest.mark.parametrize("architecture", ["minimax-01", "deepseek4", "mamba"])
def test_state_is_in_no_passes_with_padding_and_in_no_branches(architecture: str) -> None:
    for options in ({"exact": True}, {"kv_spill": "on"}):
        assert shaped(architecture, sequences=2, **options).sequences == 1
        assert shaped("llama", sequences=2, **options).sequences == 2
    shared = shaped(architecture, sequences=2, speculate="ngram")
    assert shared == replace(shared, sequences=2, branches=0, outputs_per_pass=1)
    assert shaped("llama", sequences=2, speculate="ngram").branches
