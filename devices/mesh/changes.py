"""Changes the list of members for a command: first on this device, then on the others."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from edge_run.base.errors import MeshError
from edge_run.devices.members.cluster import Cluster, Invited
from edge_run.devices.members.keys import KEY_BYTES, DeviceKey
from edge_run.devices.members.list_changes import ListEditor
from edge_run.devices.members.list_file import change_list
from edge_run.devices.members.member_list import Invitation, MemberList, Role
from edge_run.devices.mesh.opening import MeshConfig, known_cluster, open_mesh

HEARD_S, TRIES = 5.0, 5


def make_change(
    folder: Path, change: Callable[[ListEditor], MemberList], is_made: Callable[[MemberList], bool]
) -> tuple[Cluster, str]:
    """Change the list, and let the others have it. Return the cluster, and why nobody could be told; empty: they were.

    Where another device changed the list in the same moment, one of the two is dropped everywhere, but for removals
    (`Roster`); what `is_made` does not find is changed once more, also where another program of this device, which
    heard of the other change first, has written that over this one. Raises MeshError, NotTrusted.
    """
    for _ in range(TRIES):
        cluster = change_list(folder, change)
        listed, why = spread(folder)
        if is_made(listed or known_cluster(folder).listed):
            return cluster, why
    raise MeshError("member list: others change it all the time; try again")


def spread(folder: Path) -> tuple[MemberList | None, str]:
    """Let the others have the list that is kept here. Return what they have; None, and why, where they have none."""
    try:
        node = open_mesh(MeshConfig(folder, is_watching=True))
    except MeshError as error:
        return None, str(error)
    try:
        node.publish_list()
        if (listed := node.wait_list_heard(timeout_s=HEARD_S)) is not None:
            return listed, ""
        return None, f"the broker at {node.broker} takes the list and does not pass it on; see `edge-run mesh doctor`"
    finally:
        node.close()


def new_invitation(role: Role, uses: int, expires_s: int) -> tuple[Invitation, bytes]:
    """Return an invitation, and the seed of its key."""
    seed = secrets.token_bytes(KEY_BYTES)
    key = DeviceKey(seed)
    return Invitation(key.public_key, key.seal_key, role, uses, expires_s), seed


def invited_to(cluster: Cluster, broker: str, seed: bytes) -> Invited:
    """Return what the line of an invitation says. broker: its URL, as other devices reach it."""
    return Invited(cluster.id, cluster.founder, broker, cluster.listed.charter.broker_key, seed)
