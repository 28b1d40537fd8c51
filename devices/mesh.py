"""A device's place in a mesh, opened from what is kept in a folder: its key, and the cluster it belongs to."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from edge_run.base.errors import ConfigError, MeshError
from edge_run.base.mesh import Document
from edge_run.devices.link import LOOPBACK
from edge_run.devices.mesh_cluster import FIND_BROKER, Broker, Cluster, parse_broker, read_cluster
from edge_run.devices.mesh_identity import make_identity, take_identity
from edge_run.devices.mesh_node import MeshNode

CONNECT_S = 5.0
EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """How to take part in a mesh.

    folder: where the key and the cluster are kept. broker: another address than the cluster's. name: what people call
    this device. listen: addresses for the data link, 0.0.0.0 being all of them; empty: what `edge-run mesh join` was
    told last, or loopback. port: of the data link; 0: the one after that of `edge-run mesh join`, or any that is free.
    is_watching: look on, without being a member. connect_s: how long to wait for the broker; 0: not at all.
    """

    folder: Path
    broker: str | None = None
    name: str = ""
    listen: tuple[str, ...] = ()
    port: int = 0
    is_watching: bool = False
    connect_s: float = CONNECT_S
    capabilities: Document = field(default_factory=dict)


def open_mesh(config: MeshConfig) -> MeshNode:
    """Return this device's place in its mesh; close it when done.

    Raises MeshError where this device belongs to no cluster, or the broker does not answer; ConfigError, NotTrusted.
    """
    cluster = known_cluster(config.folder)
    if config.broker:
        cluster = dataclasses.replace(cluster, broker=config.broker)
    identity = make_identity(time.time) if config.is_watching else take_identity(config.folder, time.time)
    try:
        name = config.name or socket.gethostname() or identity.node
        told = config.listen or cluster.listen
        if not config.is_watching:
            check_listen(told)  # a card may have another address than when it was told
        listen = told or (LOOPBACK,)
        places = None if config.is_watching else listen
        port = config.port or (cluster.port + 1 if cluster.port else 0)
        node = MeshNode(identity, cluster, name, broker_finder(cluster), places, port)
    except BaseException:
        identity.release()
        raise
    link = {} if config.is_watching else {"key": node.link.key, "places": reachable(listen, node.link.port)}
    try:
        node.start(link, config.capabilities)
        if config.connect_s:
            node.wait_connected(timeout_s=config.connect_s)
    except BaseException:
        node.close()
        raise
    return node


def known_cluster(folder: Path) -> Cluster:
    """Return the cluster that this device belongs to. Raises MeshError where it belongs to none."""
    cluster = read_cluster(folder)
    if cluster is None:
        raise MeshError(
            "mesh: this device belongs to none; `edge-run mesh init` makes one, `edge-run mesh join LINE` joins one"
        )
    return cluster


def broker_finder(cluster: Cluster) -> Callable[[], Broker]:
    """Return what says where the broker of `cluster` is: its address, or a search on the local network."""
    if cluster.broker == FIND_BROKER:
        from edge_run.devices.mesh_discovery import find_broker

        return lambda: find_broker(cluster)
    broker = parse_broker(cluster.broker)
    return lambda: broker


def reachable(listen: tuple[str, ...], port: int) -> list[str]:
    """Return where others may reach what listens on `listen`: on every network card, where it does."""
    places: list[str] = []
    for address in listen:
        found = own_addresses(address) if address in EVERYWHERE else [address]
        places += [f"tcp://[{one}]:{port}" if ":" in one else f"tcp://{one}:{port}" for one in found]
    return list(dict.fromkeys(places))[:16]


def own_addresses(listen: str) -> list[str]:
    """Return the addresses of this device's network cards that are up, loopback last."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    states = psutil.net_if_stats()
    found = [
        one.address
        for card, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == family and "%" not in one.address and states[card].isup
    ]
    return sorted(found, key=lambda address: address in (LOOPBACK, "::1"))


def check_listen(listen: tuple[str, ...]) -> None:
    """Raise ConfigError where `listen` has an address that this device does not have."""
    own = {one.address for addresses in psutil.net_if_addrs().values() for one in addresses}
    for address in listen:
        if address not in own and address not in EVERYWHERE:
            raise ConfigError(
                f"--listen {address}: is no address of this device; it has {', '.join(sorted(own))[:200]}, and "
                "`edge-run mesh join --listen ADDRESS` remembers another one"
            )
