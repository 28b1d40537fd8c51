"""What a member keeps of what others say of themselves: bounded, under however many names and topics it is said."""

from __future__ import annotations

import random

import pytest

from edge_run.base.errors import ProtocolError
from edge_run.base.mesh import Joined, Lost
from edge_run.devices.members.cluster import found_cluster
from edge_run.devices.members.identity import make_identity
from edge_run.devices.members.keys import DeviceKey
from edge_run.devices.mesh.clocks import Clocks
from edge_run.devices.mesh.state import MeshState
from edge_run.devices.messages.envelope import Writer
from edge_run.devices.messages.topics import Topic
from edge_run.devices.presence.message_quota import MOST_KEPT_BYTES, MessageQuota
from mesh_lists import settle

DEVICE = DeviceKey(bytes(range(32)))
CLUSTER = found_cluster(DEVICE, "one", "mqtt://host")
CLOCKS = Clocks(lambda: 1.7e9, lambda: 1.7e9, random.Random(0))


def state_of(*, is_watching: bool) -> MeshState:
    """What a node of the one device knows, which believes what the others of it say."""
    state = MeshState(make_identity(CLOCKS.wall, DEVICE), CLUSTER, "here", CLOCKS, is_watching)
    settle(state)
    return state


def test_a_later_message_is_in_place_of_the_one_before_and_who_went_takes_no_room() -> None:
    room, half = MessageQuota(), MOST_KEPT_BYTES // 2
    for _ in range(3):
        room.take("one", "caps", half, {"one"})
    room.take("two", "caps", half, {"one", "two"})
    with pytest.raises(ProtocolError, match="node three: says 1 bytes of itself, and 2097152 of 2097152 are kept"):
        room.take("three", "caps", 1, {"one", "two"})
    room.take("three", "load", half, {"two"})


def test_a_device_that_comes_as_many_nodes_takes_no_more_room() -> None:
    state = state_of(is_watching=True)
    for _ in range(8):
        rogue = make_identity(CLOCKS.wall, DEVICE)
        writer = Writer(rogue, CLUSTER, CLOCKS.wall)
        body = {"name": "x", "link": {}, "heard": [state.identity.incarnation], "capabilities": {"x": [[]] * 60_000}}
        for kind, words in (("caps", body), ("load", {"load": {"x": [[]] * 60_000}})):
            topic = Topic(CLUSTER.id, kind, rogue.node)
            state.take_in(str(topic), writer.seal(topic, 1, words)[0])  # type: ignore[arg-type]
    kept = [member.capabilities for member in state.members()] + list(state.loads.values())
    assert 5 < len(kept) <= MOST_KEPT_BYTES // 180_000


def test_what_waits_to_be_told_of_members_is_their_latest_word() -> None:
    """Nobody asks, as in a chat that is idle; what a member says may take megabytes."""
    state = state_of(is_watching=False)
    state._tell(Lost("the device that computed", "it is silent"))
    members = [make_identity(CLOCKS.wall, DEVICE) for _ in range(3)]
    for rogue in members:
        writer, topic = Writer(rogue, CLUSTER, CLOCKS.wall), Topic(CLUSTER.id, "caps", rogue.node)
        for number in range(500):
            body = {"name": "x", "link": {}, "heard": [state.identity.incarnation], "capabilities": {"x": number}}
            state.take_in(str(topic), writer.seal(topic, 1, body)[0])  # type: ignore[arg-type]
    first, *events = state.events
    assert first == Lost("the device that computed", "it is silent")
    joined = [event.member for event in events if isinstance(event, Joined)]
    assert [(member.node, member.capabilities["x"]) for member in joined] == [(one.node, 499) for one in members]
    assert len(joined) == len(events)


def test_orders_for_others_leave_nothing_behind() -> None:
    state = state_of(is_watching=False)
    rogue = make_identity(CLOCKS.wall, DEVICE)
    writer = Writer(rogue, CLUSTER, CLOCKS.wall)
    for _ in range(50):
        topic = Topic(CLUSTER.id, "cmd", make_identity(CLOCKS.wall, DEVICE).node)
        state.take_in(str(topic), writer.seal(topic, 1, {"number": 1, "order": {}})[0], sender=rogue.node)
    assert not state._gate._senders
