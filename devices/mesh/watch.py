"""Looks at a mesh without being a member: who is there now, and what each device has and does."""

from __future__ import annotations

import time
from collections.abc import Collection

from edge_run.base.fields import MOST_RATE, MOST_S, Document, JsonValue, is_name, is_number
from edge_run.base.mesh import Member
from edge_run.base.mesh_status import MeshLink, MeshMember, MeshStatus
from edge_run.devices.members.cluster import Cluster
from edge_run.devices.mesh.node import LocalNode

LOOK_S = 1.5
MOST_LAYERS = 1 << 20


def look(node: LocalNode, cluster: Cluster, look_s: float = LOOK_S) -> MeshStatus:
    """Return what `node` sees of its mesh in `look_s`: all who are present answer at once when somebody looks on."""
    deadline_s = time.monotonic() + look_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        node.wait(timeout_s=left_s)
    with node.held() as state:
        epoch, plan = state.plan or (0, {})
        holder = state.lease.holder or ""
        is_current = bool(holder) and epoch == state.lease.epoch
        members = state.members()
        return MeshStatus(
            cluster=cluster.id,
            broker=node.broker,
            coordinator=holder,
            epoch=state.lease.epoch,
            plan=plan if is_current else {},
            members=tuple(
                _member(member, holder, plan if is_current else {}, present(state.loads.get(member.node, {}), members))
                for member in members
            ),
        )


def present(load: Document, members: Collection[Member]) -> Document:
    """Return `load` without the links to devices that are not among `members`: the links to them are gone too."""
    nodes, links = {member.node for member in members}, load.get("links")
    if not isinstance(links, dict):
        return load
    return {**load, "links": {node: link for node, link in links.items() if node in nodes}}


def _member(member: Member, holder: str, plan: Document, load: Document) -> MeshMember:
    layers = plan.get("layers")
    return MeshMember(
        node=member.node,
        name=member.name,
        is_coordinator=member.node == holder,
        capabilities=member.capabilities,
        layers=_ranges(layers.get(member.node) if isinstance(layers, dict) else None),
        load={key: value for key, value in load.items() if key != "links"},
        links=links_of(load),
    )


def _ranges(value: JsonValue) -> tuple[tuple[int, int], ...]:
    """Return ranges of layers, of which the plan gives the first and the one after the last."""
    found: list[tuple[int, int]] = []
    for pair in value if isinstance(value, (list, tuple)) else ():
        whole = [one for one in pair if type(one) is int and 0 <= one <= MOST_LAYERS] if isinstance(pair, list) else []
        if len(whole) == 2:
            found.append((whole[0], whole[1] - 1))
    return tuple(found)


def links_of(load: Document) -> tuple[MeshLink, ...]:
    """Return the links of which a member's `load` says what it measured."""
    links, found = load.get("links"), []
    for node, link in sorted(links.items()) if isinstance(links, dict) else ():
        if isinstance(link, dict):
            place, trip, rate = link.get("place"), link.get("round_trip_s"), link.get("bytes_per_s")
            if is_name(place) and is_number(trip, 0.0, MOST_S) and is_number(rate, 0.0, MOST_RATE):
                found.append(MeshLink(place, float(trip), float(rate), node))
    return tuple(found)
