"""The queue of what came over the data link: bounded, and no obstacle where nobody receives."""

from __future__ import annotations

import pytest

from edge_run.base.errors import DeviceLost
from edge_run.base.mesh import Message
from edge_run.devices.link.inbox import MOST_BYTES, MOST_MESSAGES, UNASKED_MESSAGES, Inbox

MESSAGE = Message("a", {})


def test_whoever_receives_is_waited_for_when_it_is_full() -> None:
    told: list[str] = []
    inbox = Inbox(lambda: told.append("room"), 100, 3)
    assert inbox.get(0.0) is None
    for _ in range(3):
        assert not inbox.is_full
        inbox.put(MESSAGE, 10)
    assert inbox.is_full
    inbox.put(DeviceLost("gone", node="b"))  # a loss is told in any case
    assert inbox.get(0.0) is MESSAGE
    assert not told
    assert inbox.get(0.0) is MESSAGE
    assert told == ["room"]
    inbox.put(MESSAGE, 90)
    assert inbox.is_full


def test_where_nobody_receives_it_is_never_full_and_holds_no_more() -> None:
    inbox = Inbox(lambda: None, 100, 3)
    heard: list[object] = []
    inbox.overhear(heard.append)
    for _ in range(50):
        assert not inbox.is_full
        inbox.put(MESSAGE, 10)
    assert len(heard) == 50
    assert [inbox.get(0.0) for _ in range(4)] == [MESSAGE] * 3 + [None]


def test_before_anybody_receives_little_is_kept_and_then_all() -> None:
    inbox = Inbox(lambda: None, MOST_BYTES, MOST_MESSAGES)
    for _ in range(UNASKED_MESSAGES + 10):
        inbox.put(MESSAGE, 10)
    assert sum(inbox.get(0.0) is MESSAGE for _ in range(UNASKED_MESSAGES + 10)) == UNASKED_MESSAGES
    for _ in range(UNASKED_MESSAGES + 10):
        inbox.put(MESSAGE, 10)
    assert all(inbox.get(0.0) is MESSAGE for _ in range(UNASKED_MESSAGES + 10))


def test_what_is_not_wanted_is_heard_and_dropped() -> None:
    inbox = Inbox(lambda: None, 100, 3)
    heard: list[object] = []
    inbox.overhear(heard.append)
    inbox.take_only(lambda item: isinstance(item, DeviceLost))
    inbox.put(MESSAGE, 10)
    inbox.put(DeviceLost("gone", node="b"))
    assert len(heard) == 2
    with pytest.raises(DeviceLost):
        inbox.get(0.0)
    assert inbox.get(0.0) is None
