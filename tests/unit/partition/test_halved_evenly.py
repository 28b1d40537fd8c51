"""The order in which chunks get lent memory: the first of them, however many, are spread evenly over all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_run.partition.plan import MOST_RUNS, ResidencyPlan, halved_evenly, with_lent


def gaps(places: Sequence[int]) -> list[int]:
    """How far each of `places` is from the next one."""
    return [b - a for a, b in pairwise(sorted(places))]


@given(chunks=st.lists(st.integers(0, 10**6), max_size=3 * MOST_RUNS, unique=True))
def test_each_chunk_comes_once(chunks: list[int]) -> None:
    assert sorted(halved_evenly(chunks)) == sorted(chunks)


@pytest.mark.parametrize("n_chunks", [1, 2, 3, 7, 8, 100, 127, 256, MOST_RUNS])
def test_any_number_of_the_first_leaves_gaps_that_differ_by_a_factor_of_two(n_chunks: int) -> None:
    order = halved_evenly(range(n_chunks))
    for n_first in range(1, n_chunks + 1):
        found = gaps(order[:n_first])
        widest = max(found, default=n_chunks)
        assert widest <= 2 * min(found, default=n_chunks)
        assert min(order[:n_first]) == 0
        assert n_chunks - max(order[:n_first]) <= 2 * widest, "and none is left out at the end"
        assert widest <= 2 * -(-n_chunks // n_first)


def test_where_there_are_very_many_neighbours_come_together() -> None:
    chunks = range(10, 10 + 5 * MOST_RUNS + 3)
    order = halved_evenly(chunks)
    runs = 1 + sum(b != a + 1 for a, b in pairwise(order))
    assert runs <= MOST_RUNS
    assert sorted(order) == list(chunks)
    first = order[: len(order) // 4]
    assert max(gaps(first)) <= 2 * 4 * 6, "runs of at most 6, of which every fourth or eighth has come"


@given(n_streamed=st.integers(1, 300), most_lent=st.integers(0, 400))
def test_no_more_is_lent_than_streams(n_streamed: int, most_lent: int) -> None:
    streamed = tuple(range(100, 100 + n_streamed))
    plan = with_lent(ResidencyPlan((), streamed, 4, n_streamed, 0), [(chunk,) for chunk in streamed], most_lent)
    assert len(plan.lent) == len(set(plan.lent)) == min(most_lent, n_streamed)
    assert set(plan.lent) <= set(streamed)
    assert plan.streamed_uses <= n_streamed - len(plan.lent)
