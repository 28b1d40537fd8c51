"""Clusters with a list of members, made without a network; and a member that does not go when it is sent away."""

from __future__ import annotations

import dataclasses
import secrets
import time
from pathlib import Path
from typing import Any

from edge_run.devices.members.cluster import Cluster, found_cluster, write_cluster
from edge_run.devices.members.identity import device_key, write_private
from edge_run.devices.members.join_request import ask, read_request
from edge_run.devices.members.keys import KEY_BYTES, DeviceKey
from edge_run.devices.members.list_changes import ListEditor, found
from edge_run.devices.members.member_list import MemberList
from edge_run.devices.mesh.changes import new_invitation
from edge_run.devices.mesh.node import LocalNode
from edge_run.devices.mesh.state import MeshState
from edge_run.devices.messages.topics import Topic


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
    cluster = found_cluster(founder, names[0], broker, serves)
    listed = cluster.listed
    for name in names[1:]:
        listed = let_in(ListEditor(founder, listed, cluster.secret), device_key(folder / name), name)
    for number, name in enumerate(names):
        own = dataclasses.replace(cluster, serves=None if number else serves)
        write_cluster(folder / name, own.adopt(listed, device_key(folder / name)))
    return cluster.adopt(listed, founder)


class Members:
    """A cluster with devices to spare in its list: a test makes any folder that of one of them.

    founder: the key of the device that made the cluster. No folder is that device's unless a test wants it.
    devices: the keys of the others, of whom the last is the first to get a folder.
    cluster: as the founder has it.
    """

    def __init__(self, broker: str, serves: str | None = None, spare: int = 8, now_s: float | None = None) -> None:
        """`serves` is where the founder's device runs the broker. now_s: when they came in."""
        seeds = [secrets.token_bytes(KEY_BYTES) for _ in range(spare + 1)]
        self.founder, *self.devices = map(DeviceKey, seeds)
        made = found_cluster(self.founder, "founder", broker, serves)
        listed = made.listed
        for number, device in enumerate(self.devices):
            listed = let_in(ListEditor(self.founder, listed, made.secret), device, f"device {number}", now_s)
        self.cluster = made.adopt(listed, self.founder)
        self._founders, *self._spare = seeds
        self._taken: set[Path] = set()

    def move_into(self, folder: Path, *, is_founder: bool = False, **changes: Any) -> Path:
        """Make `folder` that of a member, who keeps its key when it is so once more. changes: of the cluster there."""
        if folder not in self._taken:
            self._taken.add(folder)
            write_private(folder / "node.key", self._founders if is_founder else self._spare.pop())
        own = self.cluster if is_founder else dataclasses.replace(self.cluster, serves=None)
        write_cluster(folder, dataclasses.replace(own, **changes))
        return folder


def stranger_in(folder: Path, cluster: Cluster) -> Path:
    """Make `folder` that of a device that founded a cluster of the same id, with another secret."""
    device, secret = device_key(folder), secrets.token_bytes(KEY_BYTES)
    listed = found(device, cluster.id, "stranger", secret, runs_broker=False)
    write_cluster(folder, Cluster(cluster.id, secret, cluster.broker, device.public_key, listed))
    return folder


def settle(state: MeshState) -> None:
    """Have `state` hear its own list from the broker: from then on it believes what members say."""
    state.take_in(str(Topic(state.cluster, "members")), state.roster.listed.payload)
    assert state.roster.is_settled


def defy(node: LocalNode) -> None:
    """Have `node` go on as it was, whatever list it hears of: as a device would that is in a stranger's hands."""
    with node.held() as state:
        state.roster.take = lambda payload: False  # type: ignore[method-assign]
