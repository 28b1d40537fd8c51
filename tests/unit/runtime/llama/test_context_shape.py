"""How many tokens a pass has at most beside which room is lent to weights."""

import pytest

from edge_run.base.config import ModelConfig
from edge_run.runtime.llama.context_shape import RIDING_TOKENS, context_shape


@pytest.mark.parametrize(
    ("options", "n_tokens", "n_verified"),
    [
        ({}, 1, 0),
        ({"outputs_per_pass": 12}, 12, 0),
        ({"sequences": 4}, 4 + RIDING_TOKENS, 4),
        ({"sequences": 4, "outputs_per_pass": 12}, 12 + RIDING_TOKENS, 12),
        ({"sequences": 4, "micro_batch_tokens": 8}, 8, 4),
        ({"sequences": 4, "exact": True}, 8, 0),  # each text has cells of its own
    ],
)
def test_narrow_passes(options: dict[str, object], n_tokens: int, n_verified: int) -> None:
    config = ModelConfig(**{"context_tokens": 2048, "micro_batch_tokens": 256, **options})  # type: ignore[arg-type]
    shape = context_shape(config, 4096, 2)
    assert (shape.narrow_tokens, shape.verified_tokens) == (n_tokens, n_verified)
