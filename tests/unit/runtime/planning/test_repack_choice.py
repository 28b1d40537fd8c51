"""For which widths of passes the kernels of weights are chosen."""

from __future__ import annotations

import pytest

from edge_run.runtime.planning.repack_choice import _of_one


@pytest.mark.parametrize(
    ("width", "share", "tokens"),
    [(1, 1.0, 1), (512, 1.0, 512), (1, 0.0625, 1), (16, 0.0625, 2), (512, 0.0625, 32), (512, 1 / 512, 2)],
)
def test_each_expert_meets_some_of_the_tokens_of_a_pass(width: int, share: float, tokens: int) -> None:
    """Of those experts that any token uses: 16 tokens that use 8 of 128 each come to 82 experts."""
    assert _of_one(width, share) == tokens
