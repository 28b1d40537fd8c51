"""Clusters with a list of members, made without a network; and a member that does not go when it is sent away."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from edge_run.devices.members.cluster import Cluster, new_cluster, write_cluster
from edge_run.devices.members.identity import device_key
from edge_run.devices.members.join_request import ask, read_request
from edge_run.devices.members.keys import DeviceKey
from edge_run.devices.members.list_changes import ListEditor, found
from edge_run.devices.members.member_list import MemberList
from edge_run.devices.mesh.changes import new_invitation
from edge_run.devices.mesh.node import LocalNode


def let_in(editor: ListEditor, device: DeviceKey, name: str, now_s: float | None = None) -> MemberList:
    """Return the list of `editor` with `device` in it, which came with an invitation."""
    now_s = time.time() if now_s is None else now_s
    invitation, seed = new_invitation("use", 1, int(now_s) + 3600)
    invited = ListEditor(editor.device, editor.invite(invitation, now_s), editor.secret)
    request = ask(DeviceKey(seed), device, editor.listed.charter.cluster, name, now_s)
    return invited.admit(read_request(request, editor.listed.charter.cluster, lambda _: True), now_s)


def make_cluster(folder: Path, broker: str, names: list[str], serves: str | None = None) -> Cluster:
    """Make a folder in `folder` for each of `names`, members of one cluster, whose first is its founder."""
    founder = device_key(folder / names[0])
    bare = new_cluster(broker, serves)
    cluster = dataclasses.replace(bare, founder=founder.public_key)
    listed = found(founder, cluster.id, names[0], cluster.secret, runs_broker=serves is not None)
    for name in names[1:]:
        listed = let_in(ListEditor(founder, listed, cluster.secret), device_key(folder / name), name)
    for number, name in enumerate(names):
        own = dataclasses.replace(cluster, serves=None if number else serves)
        write_cluster(folder / name, own.adopt(listed, device_key(folder / name)))
    return cluster.adopt(listed, founder)


def defy(node: LocalNode) -> None:
    """Have `node` go on as it was, whatever list it hears of: as a device would that is in a stranger's hands."""
    with node.held() as state:
        state.roster.take = lambda payload: False  # type: ignore[method-assign]
