"""The schedule of a pass: each segment holds what its nodes need, and in the end nothing is held."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from edge_run.prefetch.schedule import join_stage_visits, schedule_pass

Nodes = list[tuple[frozenset[int], bool]]
nodes = st.lists(st.tuples(st.frozensets(st.integers(0, 30), max_size=6), st.booleans()), min_size=1, max_size=40)


@given(nodes=nodes, segment_chunks=st.integers(1, 8))
def test_what_a_segment_holds_is_what_its_nodes_need(nodes: Nodes, segment_chunks: int) -> None:
    schedule = schedule_pass([needs for needs, _ in nodes], [may_cut for _, may_cut in nodes], segment_chunks)
    held: set[int] = set()
    done = 0
    for segment in schedule:
        assert segment.first == done, "every node is in exactly one segment"
        assert segment.first == 0 or nodes[segment.first][1], "cut where no cut was allowed"
        assert not held & set(segment.acquire), "held already"
        held |= set(segment.acquire)
        assert held == set(segment.needs)
        assert held == {chunk for needs, _ in nodes[segment.first : segment.last + 1] for chunk in needs}
        assert set(segment.release) <= held
        held -= set(segment.release)
        done = segment.last + 1
    assert done == len(nodes)
    assert not held


@given(nodes=nodes, segment_chunks=st.integers(1, 8))
def test_a_segment_is_no_larger_than_it_must_be(nodes: Nodes, segment_chunks: int) -> None:
    """Between two allowed cuts lies a piece that cannot be split: more than one only while they fit together."""
    schedule = schedule_pass([needs for needs, _ in nodes], [may_cut for _, may_cut in nodes], segment_chunks)
    for segment in schedule:
        cuts = [i for i in range(segment.first + 1, segment.last + 1) if nodes[i][1]]
        for cut in cuts:
            before = {chunk for needs, _ in nodes[segment.first : cut] for chunk in needs}
            together = before | nodes[cut][0]
            assert not before or len(together) <= max(segment_chunks, len(before))


@given(nodes=nodes, segment_chunks=st.integers(1, 8))
def test_no_cut_without_need(nodes: Nodes, segment_chunks: int) -> None:
    """Each segment is a stop of the whole pass: one that brings no new chunk costs time for nothing."""
    schedule = schedule_pass([needs for needs, _ in nodes], [may_cut for _, may_cut in nodes], segment_chunks)
    for before, after in pairwise(schedule):
        assert not nodes[after.first][0] <= set(before.needs)


@given(nodes=nodes, segment_chunks=st.integers(1, 8), borders=st.sets(st.integers(1, 39)))
def test_a_stage_visit_holds_what_its_segments_need(nodes: Nodes, segment_chunks: int, borders: set[int]) -> None:
    needs, may_cut = [needs for needs, _ in nodes], [may_cut for _, may_cut in nodes]
    inside = {border for border in borders if border < len(nodes)}
    segments = schedule_pass(needs, may_cut, segment_chunks, inside)
    visits = join_stage_visits(segments, inside)
    assert len(visits) <= len(inside) + 1
    held: set[int] = set()
    for visit in visits:
        assert not any(visit.first < border <= visit.last for border in inside), "it goes over a border"
        parts = [segment for segment in segments if visit.first <= segment.first <= visit.last]
        assert (parts[0].first, parts[-1].last) == (visit.first, visit.last)
        assert not held & set(visit.acquire), "held already"
        held |= set(visit.acquire)
        assert held == {chunk for part in parts for chunk in part.needs}
        assert set(visit.release) <= held
        held -= set(visit.release)
    assert not held
