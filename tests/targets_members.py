"""What says who is a member: lists, and requests to come in."""

from __future__ import annotations

import json
import random
import secrets
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from edge_run.base.units import KIB, MIB
from hostile_target import Target, target


@target
def member_lists(folder: Path, stack: ExitStack) -> Target:
    """Lists as they come from the broker, taken in by a member end to end; each signed by whom it says."""
    from edge_run.base.errors import NotTrusted, ProtocolError
    from edge_run.devices.members import member_list
    from edge_run.devices.members.cluster import read_cluster
    from edge_run.devices.members.identity import take_identity
    from edge_run.devices.members.list_changes import ListEditor
    from edge_run.devices.members.roster import Roster
    from mesh_lists import make_cluster

    make_cluster(folder, "mqtt://host", ["one", "two", "three"])
    cluster = read_cluster(folder / "one")
    assert cluster is not None
    identity = take_identity(folder / "one", lambda: 1.7e9)
    stack.callback(identity.release)
    editor = ListEditor(identity.device, cluster.listed, cluster.secret)
    seeds = [cluster.listed.payload, editor.rotate(bytes(32)).payload, editor.change_role("two", "lead").payload]
    seeds += [editor.hand_on("two").payload]
    stack.enter_context(mock.patch.object(member_list, "is_signed", return_value=True))

    def feed(data: bytes) -> bool:
        roster = Roster(identity, cluster, lambda: 0.0, lambda: 1.7e9, random.Random(0))
        roster.connect()
        roster.take(data)
        roster.pass_time()
        roster.check()
        return True

    documents = [json.loads(seed) for seed in seeds]
    return Target(
        "member lists", feed, (ProtocolError, NotTrusted), seeds, 16 * MIB, documents, largest_bytes=150 * KIB
    )


@target
def requests(folder: Path, stack: ExitStack) -> Target:
    """Requests to come in, with a known invitation and signatures that fit, whatever they say."""
    from edge_run.base.errors import NotTrusted, ProtocolError
    from edge_run.devices.members import join_request
    from edge_run.devices.members.keys import DeviceKey

    guest, device = (DeviceKey(secrets.token_bytes(32)) for _ in range(2))
    seeds = [join_request.ask(guest, device, "abcdefgh", name, 1.8e9) for name in ("one", "ein Gerät")]
    stack.enter_context(mock.patch.object(join_request, "is_signed", return_value=True))

    def feed(data: bytes) -> bool:
        found = join_request.read_request(data, "abcdefgh", lambda key: True)
        assert found.member.name.isprintable()
        return True

    documents = [json.loads(seed) for seed in seeds]
    return Target("requests", feed, (ProtocolError, NotTrusted), seeds, 4 * MIB, documents)
