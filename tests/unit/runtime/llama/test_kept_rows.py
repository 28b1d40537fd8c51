"""What is kept of passes and long texts is planned for: a row of logits of a large vocabulary is half a megabyte."""

import pytest

from edge_run.base.config import ModelConfig
from edge_run.runtime.llama.context_shape import context_shape
from edge_run.runtime.llama.holdings import text_reserve_bytes

VOCABULARY = 152_000


@pytest.mark.parametrize(
    ("options", "n_rows"),
    [
        ({}, 1),
        ({"outputs_per_pass": 48}, 48),
        ({"sequences": 16}, 16),
        ({"outputs_per_pass": 48, "exact": True}, 48),
        ({"outputs_per_pass": 48, "kv_spill": "on", "sequences": 4}, 48),
        ({"embeddings": True, "pooling": "mean"}, 1),
    ],
)
def test_each_row_of_logits_is_reserved(options: dict[str, object], n_rows: int) -> None:
    shape = context_shape(ModelConfig(context_tokens=1024, micro_batch_tokens=64, **options), 4096, 2)  # type: ignore[arg-type]
    assert shape.kept_rows == n_rows
    more = text_reserve_bytes(VOCABULARY, shape.kept_rows) - text_reserve_bytes(VOCABULARY)
    assert more == (n_rows - 1) * VOCABULARY * 4


def test_tokens_of_long_contexts_are_reserved_for() -> None:
    short = text_reserve_bytes(VOCABULARY)
    assert text_reserve_bytes(VOCABULARY, context_tokens=8192) == short
    assert text_reserve_bytes(VOCABULARY, context_tokens=131_072) - short == (131_072 - 8192) * 256
