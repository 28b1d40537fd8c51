"""The schedule of a pass: each stretch holds what its nodes need, and in the end nothing is held."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from edge_run.prefetch.schedule import join_turns, schedule_pass

Nodes = list[tuple[frozenset[int], bool]]
nodes = st.lists(st.tuples(st.frozensets(st.integers(0, 30), max_size=6), st.booleans()), min_size=1, max_size=40)


@given(nodes=nodes, stretch_chunks=st.integers(1, 8))
def test_what_a_stretch_holds_is_what_its_nodes_need(nodes: Nodes, stretch_chunks: int) -> None:
    schedule = schedule_pass([needs for needs, _ in nodes], [may_cut for _, may_cut in nodes], stretch_chunks)
    held: set[int] = set()
    done = 0
    for stretch in schedule:
        assert stretch.first == done, "every node is in exactly one stretch"
        assert stretch.first == 0 or nodes[stretch.first][1], "cut where no cut was allowed"
        assert not held & set(stretch.acquire), "held already"
        held |= set(stretch.acquire)
        assert held == set(stretch.needs)
        assert held == {chunk for needs, _ in nodes[stretch.first : stretch.last + 1] for chunk in needs}
        assert set(stretch.release) <= held
        held -= set(stretch.release)
        done = stretch.last + 1
    assert done == len(nodes)
    assert not held


@given(nodes=nodes, stretch_chunks=st.integers(1, 8))
def test_a_stretch_is_no_larger_than_it_must_be(nodes: Nodes, stretch_chunks: int) -> None:
    """Between two allowed cuts lies a piece that cannot be split: more than one only while they fit together."""
    schedule = schedule_pass([needs for needs, _ in nodes], [may_cut for _, may_cut in nodes], stretch_chunks)
    for stretch in schedule:
        cuts = [i for i in range(stretch.first + 1, stretch.last + 1) if nodes[i][1]]
        for cut in cuts:
            before = {chunk for needs, _ in nodes[stretch.first : cut] for chunk in needs}
            together = before | nodes[cut][0]
            assert not before or len(together) <= max(stretch_chunks, len(before))


@given(nodes=nodes, stretch_chunks=st.integers(1, 8))
def test_no_cut_without_need(nodes: Nodes, stretch_chunks: int) -> None:
    """Each stretch is a stop of the whole pass: one that brings no new chunk costs time for nothing."""
    schedule = schedule_pass([needs for needs, _ in nodes], [may_cut for _, may_cut in nodes], stretch_chunks)
    for before, after in pairwise(schedule):
        assert not nodes[after.first][0] <= set(before.needs)


@given(nodes=nodes, stretch_chunks=st.integers(1, 8), borders=st.sets(st.integers(1, 39)))
def test_a_turn_holds_what_its_stretches_need(nodes: Nodes, stretch_chunks: int, borders: set[int]) -> None:
    needs, may_cut = [needs for needs, _ in nodes], [may_cut for _, may_cut in nodes]
    inside = {border for border in borders if border < len(nodes)}
    stretches = schedule_pass(needs, may_cut, stretch_chunks, inside)
    turns = join_turns(stretches, inside)
    assert len(turns) <= len(inside) + 1
    held: set[int] = set()
    for turn in turns:
        assert not any(turn.first < border <= turn.last for border in inside), "it goes over a border"
        parts = [stretch for stretch in stretches if turn.first <= stretch.first <= turn.last]
        assert (parts[0].first, parts[-1].last) == (turn.first, turn.last)
        assert not held & set(turn.acquire), "held already"
        held |= set(turn.acquire)
        assert held == {chunk for part in parts for chunk in part.needs}
        assert set(turn.release) <= held
        held -= set(turn.release)
    assert not held
