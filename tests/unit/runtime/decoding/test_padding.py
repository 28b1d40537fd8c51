"""Which padding tokens an exact pass has."""

from __future__ import annotations

import pytest

from edge_run.base.protocols import BatchToken
from edge_run.runtime.decoding.padding import padded, padded_passes, padded_width


def chain(sequence: int, start: int, n_tokens: int) -> list[BatchToken]:
    return [BatchToken(100 * sequence + i, start + i, sequence, True) for i in range(n_tokens)]


def places(tokens: list[BatchToken]) -> list[tuple[int, int]]:
    return [(token.sequence, token.position) for token in tokens]


def test_a_token_that_is_alone_gets_one() -> None:
    line, cuts = padded(chain(1, 7, 1), [0, 7])
    assert places(line) == [(1, 7), (1, 8)]
    assert cuts == {1: 8}


def test_all_have_as_many_as_the_longest_those_between_too() -> None:
    given = [*chain(1, 7, 1), *chain(3, 0, 3)]
    line, cuts = padded(given, [9, 7, 4, 0])
    assert places(line) == [(1, 7), (1, 8), (1, 9), (2, 4), (2, 5), (2, 6), (3, 0), (3, 1), (3, 2)]
    assert [token for token in line if token in given] == given
    assert cuts == {1: 8, 2: 4}
    assert padded_width([1, 3], 3) == len(line)
    line, cuts = padded(chain(1, 7, 1), [0, 7], least=1)
    assert len(line) == padded_width([1], 1, least=1) == 1
    assert not cuts


def test_passes_have_with_padding_no_more_tokens_than_fit() -> None:
    batch = [*chain(0, 5, 1), *chain(1, 5, 1), *chain(4, 5, 2), *chain(5, 5, 1)]
    for most, wanted in ((100, [[0, 1, 4, 5]]), (8, [[0, 1], [4, 5]]), (2, [[0], [1], [4], [5]])):
        found = [*padded_passes(batch, most)]
        assert [sorted({token.sequence for token in one}) for one in found] == wanted
        assert [token for one in found for token in one] == batch, "none is lost, and none comes twice"
        for one in found:
            assert len(padded(one, [9] * 6)[0]) <= most


def test_sequences_that_are_not_in_their_order_are_a_mistake() -> None:
    """Padding tokens of those between would be counted from the wrong end."""
    with pytest.raises(AssertionError, match="in their order"):
        list(padded_passes([*chain(2, 5, 1), *chain(1, 5, 1)], 100))
