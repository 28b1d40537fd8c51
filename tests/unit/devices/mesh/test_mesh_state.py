"""What a device makes of a new list of members: of its own role, and of what its other programs have kept."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from edge_run.base.mesh import Unled
from edge_run.devices.members.identity import make_identity
from edge_run.devices.members.list_changes import ListEditor
from edge_run.devices.members.member_list import MemberList
from edge_run.devices.mesh.clocks import Clocks
from edge_run.devices.mesh.state import MeshState
from edge_run.devices.messages.topics import Topic
from mesh_lists import Members, settle

NOW_S = 1.7e9
CLOCKS = Clocks(lambda: NOW_S, lambda: NOW_S, random.Random(0))
MEMBERS = Members("mqtt://host", spare=1, now_s=NOW_S)
DEVICE, EDITOR = MEMBERS.devices[0], ListEditor(MEMBERS.founder, MEMBERS.cluster.listed, MEMBERS.cluster.secret)


def state_of() -> MeshState:
    """What the one member besides the founder knows, which is connected."""
    own = MEMBERS.cluster.adopt(MEMBERS.cluster.listed, DEVICE)
    state = MeshState(make_identity(CLOCKS.wall, DEVICE), own, "here", CLOCKS, is_watching=False)
    state.connect(True)
    return state


@pytest.mark.parametrize(
    ("change", "leads"),
    [
        (lambda: EDITOR.change_role(DEVICE.node, "compute"), False),
        (lambda: EDITOR.remove(DEVICE.node), False),
        (lambda: EDITOR.change_role(DEVICE.node, "lead"), True),
    ],
)
def test_who_leads_and_may_no_more_is_told_at_once(change: Callable[[], MemberList], leads: bool) -> None:
    """Nobody obeys it: it would take each device for lost that does not answer."""
    state = state_of()
    settle(state)
    state.lease.epoch = state.lease.held = 1 << 20
    state.events.clear()
    state.take_in(str(Topic(state.cluster, "members")), change().payload)
    assert bool(state.lease.held) == leads
    assert (Unled(1 << 20) in state.events) != leads
    assert not [one for one in state.take_due().outgoing if one.topic.kind == "lease"], "others would refuse it"


def test_a_file_says_nothing_of_what_the_broker_keeps() -> None:
    """As when another `mesh join` remembers an address: who was removed would be believed until the list comes."""
    state = state_of()
    state.take_file(state.roster.listed.payload)
    assert not state.roster.is_settled
    assert not state.roster.is_heard
    newer = EDITOR.change_role(DEVICE.node, "lead")
    state.take_file(newer.payload)
    assert state.roster.listed == newer
    assert not state.roster.is_settled, "the broker may keep one that is newer still"
    settle(state)
    state.take_file(EDITOR.change_role(DEVICE.node, "compute").payload)
    assert state.roster.is_settled, "and has said what it keeps"
