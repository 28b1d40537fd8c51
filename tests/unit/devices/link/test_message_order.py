"""The order of what peers send: connections of one start of a peer are numbered, whatever its clock says."""

from __future__ import annotations

import time

import pytest

from edge_run.base.errors import ProtocolError
from edge_run.devices.link import connection
from edge_run.devices.link.frames import FrameKind, Head
from edge_run.devices.link.order import MOST_NODES, MessageOrder


def head(number: int, sequence: int) -> Head:
    return Head(FrameKind.DATA, number, sequence, {})


def test_what_comes_late_of_an_earlier_connection_does_not_count() -> None:
    order = MessageOrder()
    assert order.take("a", "1", head(8, 0))
    assert order.take("a", "1", head(9, 0))
    assert not order.take("a", "1", head(8, 1))
    with pytest.raises(ProtocolError, match="message 2 came where 1 was to come"):
        order.take("a", "1", head(9, 2))


def test_a_peer_that_was_started_anew_is_heard_though_its_clock_was_put_back() -> None:
    order = MessageOrder()
    assert order.take("a", "1", head(9, 0))
    assert order.take("a", "2", head(5, 0))
    assert order.take("a", "2", head(5, 1))


def test_what_was_refused_in_between_is_not_missed() -> None:
    order = MessageOrder()
    order.skip("a", head(9, 0))
    assert order.take("a", "1", head(9, 1))
    order.skip("a", head(9, 2))
    assert order.take("a", "1", head(9, 3))


def test_of_nodes_without_end_only_the_latest_and_peers_are_remembered() -> None:
    """Each program of a member is a node of its own, and is gone with it."""
    order = MessageOrder()
    assert order.take("peer", "1", head(9, 0))
    assert order.take("early", "1", head(9, 0))
    for number in range(2 * MOST_NODES):
        assert order.take(f"node{number}", "1", head(9, 0))
        order.skip("spoke again", head(9, number))
        order.forget({"peer"})
    assert len(order._expected) == MOST_NODES
    assert {"peer", "spoke again", f"node{2 * MOST_NODES - 1}"} <= order._expected.keys()
    assert "early" not in order._expected
    assert order.take("peer", "1", head(9, 1))


def test_numbers_of_connections_rise_though_the_clock_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [2_000, 1_000, 1_000, 3_000]
    monkeypatch.setattr(connection, "_latest_number", [0])
    monkeypatch.setattr(time, "time_ns", lambda: times.pop(0))
    assert [connection._next_number() for _ in range(4)] == [2_000, 2_001, 2_002, 3_000]
