"""How much of a prompt a conversation has already: all but its last token at most."""

from __future__ import annotations

import pytest

from edge_run.runtime.decoding.common_prefix import common_prefix_tokens


@pytest.mark.parametrize(
    ("held", "prompt", "wanted"),
    [
        ([], [], 0),
        ([1, 2], [], 0),
        ([1, 2], [1], 0),
        ([], [1, 2], 0),
        ([1, 2], [1, 2], 1),
        ([1, 2, 3], [1, 2, 4, 5], 2),
        ([1, 2], (1, 2, 3, 4), 2),
        ([2], [1, 2], 0),
    ],
)
def test_the_common_beginning(held: list[int], prompt: list[int], wanted: int) -> None:
    assert common_prefix_tokens(held, prompt) == wanted
