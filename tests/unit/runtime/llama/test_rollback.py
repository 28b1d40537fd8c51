"""What is known of recurrent state after passes that ended, failed, or had no room."""

from __future__ import annotations

import pytest

from edge_run.base.protocols import BatchToken, Capabilities
from edge_run.runtime.llama.rollback import Rollback


def tokens(*sequences: int) -> list[BatchToken]:
    return [BatchToken(1, position, sequence) for position, sequence in enumerate(sequences)]


@pytest.mark.parametrize(
    ("sequences", "has_state", "is_torn"),
    [((0, 2), True, True), ((1, 1, 1), True, False), ((0, 2), False, False)],
    ids=["several", "one", "no state"],
)
def test_a_pass_of_several_that_does_not_end_leaves_no_state_certain(
    sequences: tuple[int, ...], has_state: bool, is_torn: bool
) -> None:
    rollback, batch = Rollback(0, has_state=has_state), tokens(*sequences)
    assert not rollback.is_torn
    for end in (lambda: rollback.ran(batch), rollback.refused, rollback.clear):
        rollback.begin(batch)
        assert rollback.is_torn == is_torn
        end()
        assert not rollback.is_torn


def test_nothing_is_cut_off_a_context_that_was_cleared() -> None:
    """The state before its last tokens is that of another text."""
    rollback = Rollback(7, has_state=True)
    rollback.begin(tokens(*[0] * 8))
    rollback.ran(tokens(*[0] * 8))
    rollback.clear()
    assert not rollback.cut(0, 5, 3)
    assert rollback.cut(0, 8, 0)


def test_what_a_pass_across_the_end_of_a_ring_leaves_is_not_gone_on_with() -> None:
    """llama.cpp has taken back the pass itself, and goes on from the first cell of all that it had."""
    rollback = Rollback(0, Capabilities(64, 8, 2, 9, can_rewind=True, ring_tokens=8).loses_order, has_state=False)
    batch = [BatchToken(1, position, 0) for position in (6, 7, 8)] + [BatchToken(1, 8, 1)]
    for end in (lambda: rollback.ran(batch), rollback.refused, rollback.clear, lambda: rollback.empty(0)):
        rollback.begin(batch)
        assert not rollback.cut(0, 6, 0)
        assert rollback.cut(1, 8, 0)
        end()
        assert rollback.cut(0, 6, 0)
    assert not rollback.cut(0, 6, 3)
    assert rollback.cut(0, 6, 2)
