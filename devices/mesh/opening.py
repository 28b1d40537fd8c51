"""Opens a device's place in a mesh from its folder, which has the device's key and its cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from edge_run.base.errors import ConfigError, MeshError, option
from edge_run.base.fields import Document, JsonValue
from edge_run.base.interrupt import go_on
from edge_run.base.options import texts_of
from edge_run.devices.link.data_link import LOOPBACK, DataLink
from edge_run.devices.link.hosts import parse_place, place_text
from edge_run.devices.link.places import LEAST_PORT
from edge_run.devices.members.cluster import FIND_BROKER, PORT, Broker, Cluster, parse_broker, read_cluster
from edge_run.devices.members.identity import device_key, make_identity, take_identity
from edge_run.devices.members.keys import DeviceKey
from edge_run.devices.members.list_file import ListFile
from edge_run.devices.members.member_list import fitting
from edge_run.devices.mesh.node import LocalNode

logger = logging.getLogger(__name__)

FIRST_CONNECTION_S = 5.0  # for which commands wait for it
EVERYWHERE = {"0.0.0.0": LOOPBACK, "::": "::1"}  # and where a device itself reaches what listens there


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """How to take part in a mesh.

    folder: where the key and the cluster are kept; of `edge-run mesh`, `.config/edge-run/mesh` in the home folder.
    broker: another address than the cluster's, as `mqtt://HOST:PORT`.
    name: what people call this device; empty: its host name.
    listen: addresses for the data link; 0.0.0.0: all; empty: those of `edge-run mesh join`, or loopback.
    port: of the data link; 0: the one after that of `edge-run mesh join`, or any that is free, as for a second run.
    is_watching: look on, without being a member.
    connect_s: the seconds to wait for the broker; 0: not at all.
    capabilities: what other devices are told of this one, as `edge-run mesh join` fills it in.
    """

    folder: Path | str
    broker: str | None = None
    name: str = ""
    listen: Sequence[str] = ()
    port: int = 0
    is_watching: bool = False
    connect_s: float = FIRST_CONNECTION_S
    capabilities: Document = field(default_factory=dict)


def open_mesh(config: MeshConfig, check: Callable[[], None] = go_on) -> LocalNode:
    """Return this device's place in its mesh; close it when done. `check` runs while it waits, and may raise to stop.

    Raises MeshError where this device belongs to no cluster, or the broker does not answer; ConfigError, NotTrusted.
    """
    folder, listen = Path(config.folder), texts_of("listen", config.listen)
    cluster = known_cluster(folder)
    if config.broker:
        cluster = dataclasses.replace(cluster, broker=config.broker)
    is_member = not config.is_watching
    identity = take_identity(folder, time.time) if is_member else make_identity(time.time, device_key(folder))
    try:
        cluster = cluster.adopt(cluster.listed, identity.device)
        name = fitting(config.name or socket.gethostname() or identity.node)
        told = listen or cluster.listen
        if not config.is_watching:
            # A card may have another address than when it was told.
            check_listen(told, config.port or cluster.port, is_remembered=not listen)
        listen = told or (LOOPBACK,)
        places = None if config.is_watching else listen
        port = 0 if config.is_watching else config.port or (cluster.port + 1 if cluster.port else 0)
        find, file = broker_finder(cluster, identity.device), ListFile(folder, cluster)
        try:
            node = LocalNode(identity, cluster, name, find, file, places, port)
        except MeshError as error:
            if config.port or not port or getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
            logger.warning(
                "port %d is taken, as by another run: the data link of this one takes any that is free", port
            )
            node = LocalNode(identity, cluster, name, find, file, places)
    except BaseException:
        identity.release()
        raise
    try:
        node.check_member()
        node.start(lambda: {} if places is None else link_document(node.link, places), config.capabilities)
        if config.connect_s:
            node.wait_connected(timeout_s=config.connect_s, check=check)
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


def broker_finder(cluster: Cluster, device: DeviceKey) -> Callable[[], Broker]:
    """Return what says where the broker of `cluster` is, and as whom `device` connects.

    It is at its address, or searched on the local network. Where the address names no user, what an embedded broker
    wants of a member is offered.
    """
    password = broker_password(device, cluster.id, cluster.listed.charter.broker_key)

    def find() -> Broker:
        broker = locate_broker(cluster.broker, cluster.id, cluster.founder)
        if broker.user is not None or not password:
            return broker
        return dataclasses.replace(broker, user=device.node, password=password, is_offered=True)

    return find


def locate_broker(url: str, cluster: str, founder: bytes) -> Broker:
    """Return the broker that `url` names, or that is found on the local network. Raises ConfigError, MeshError.

    cluster: its id. founder: its founder's key.
    """
    if url != FIND_BROKER:
        return parse_broker(url)
    from edge_run.devices.broker.discovery import find_broker

    return find_broker(cluster, founder)


def broker_password(device: DeviceKey, cluster: str, other_key: bytes) -> str:
    """Return the password of a member at the broker of `cluster`; empty where the broker is nobody's of the cluster.

    The member makes it with the sealing key of the device that runs the broker, that device with the member's.
    """
    return device.word_with(other_key, b"edge-run broker\0" + cluster.encode()) if other_key else ""


def link_document(link: DataLink, listen: tuple[str, ...]) -> Document:
    """Return where others reach `link` now, which listens on `listen`, as `bodies.peer_of` reads it."""
    return {"key": link.key, "places": list[JsonValue](reachable(listen, link.port))}


def reachable(listen: tuple[str, ...], port: int) -> list[str]:
    """Return where others may reach what listens on `listen`: on every network card, where it does."""
    places = (f"tcp://{place_text(one, port)}" for address in listen for one in own_addresses(address))
    return list(dict.fromkeys(places))[:16]


def own_addresses(listen: str) -> list[str]:
    """Return the addresses behind `listen`: itself, or those of all network cards that are up, loopback last."""
    if listen not in EVERYWHERE:
        return [listen]
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    up = [card for card in addresses if _is_up(card, states)]
    found = [one.address for card in up for one in addresses[card] if one.family == family and "%" not in one.address]
    return sorted(found, key=lambda address: address in EVERYWHERE.values())


def _is_up(card: str, states: Mapping[str, Any]) -> bool:
    """Return whether a network card is up, as is one of which nothing is known: it was added just now.

    An address may have a label, as `eth0:1`, and is listed under that; the card is what is before the colon.
    """
    state = states.get(card) or states.get(card.partition(":")[0])
    return state is None or bool(state.isup)


def check_listen(listen: tuple[str, ...], port: int = 0, *, is_remembered: bool = False) -> None:
    """Raise ConfigError where `listen` has an address that this device does not have, or nobody would use `port`.

    is_remembered: `listen` was given to an earlier command, and not now.
    """
    if 0 < port < LEAST_PORT:
        raise ConfigError(
            f"{option('port', port)}: other devices use ports from {LEAST_PORT} on; give one of those, or 0 for any"
        )
    own = {one.address for addresses in psutil.net_if_addrs().values() for one in addresses}
    for address in listen:
        if address not in own and address not in EVERYWHERE:
            remembered = f"the address that `edge-run mesh join` remembered, {address}"
            named = remembered if is_remembered else option("listen", address)
            raise ConfigError(
                f"{named}: is no address of this device; it has {', '.join(sorted(own))[:200]}, "
                "and `edge-run mesh join --listen ADDRESS` remembers another one"
            )


def shown_broker(cluster: Cluster) -> str:
    """Return the URL by which other devices reach the broker of `cluster`."""
    if cluster.serves is None:
        return cluster.broker
    host, port = parse_place(cluster.serves, PORT)
    addresses = own_addresses(host)
    outward = _outward_address(host)
    shown = outward if outward in addresses else next(iter(addresses), host)
    return f"mqtt://{place_text(shown, port)}"


def _outward_address(listen: str) -> str:
    """Return this device's address on the network with the default route, which others share; empty without one.

    A card that is listed first may be one of containers, or of a private network of two.
    """
    family, elsewhere = (socket.AF_INET6, "2001:db8::1") if ":" in listen else (socket.AF_INET, "192.0.2.1")
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as one:
        one.connect((elsewhere, PORT))  # which sends nothing
        return str(one.getsockname()[0])
    return ""
