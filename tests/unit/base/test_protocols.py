"""What a decoder can do."""

from __future__ import annotations

from edge_run.base.protocols import Capabilities


def test_guesses_end_where_the_cells_of_a_sliding_window_begin_anew() -> None:
    """Wherever the text parts from them: the rest is read anew where what is cut lies on both sides."""
    able = Capabilities(1000, 64, 1, 10, can_rewind=True, ring_tokens=8)
    for position in range(40):
        end = position + 1 + able.most_guesses(position)
        assert not any(able.loses_order(start, end) for start in range(position + 1, end))
        assert able.loses_order(position + 1, end + 1) or position % 8 == 7
    assert able.most_guesses(998) == 1
    without = Capabilities(1000, 64, 1, 10, can_rewind=True)
    assert without.most_guesses(7) == 992
    assert not without.loses_order(0, 1000)
