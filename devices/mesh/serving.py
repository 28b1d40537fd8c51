"""Runs the embedded broker on the device that is to run it, and advertises it on the local network."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from functools import partial

from edge_run.base.errors import MeshError, NotTrusted
from edge_run.devices.broker.access import HOME, BrokerAccess, guest_user, home_user, member_user
from edge_run.devices.broker.discovery import Advertisement
from edge_run.devices.broker.embedded import EmbeddedBroker
from edge_run.devices.link.hosts import is_loopback, parse_place
from edge_run.devices.members.cluster import PORT, Cluster
from edge_run.devices.members.keys import DeviceKey
from edge_run.devices.mesh.opening import broker_password, own_addresses
from edge_run.devices.mesh.own_link import LOOK_S

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def serving(cluster: Cluster, device: DeviceKey) -> Iterator[EmbeddedBroker | None]:
    """Run the broker of `cluster` in this block, where this device is to, and give it. Raises MeshError."""
    if cluster.serves is None:
        yield None
        return
    host, port = parse_place(cluster.serves, PORT)
    with contextlib.ExitStack() as stack:
        broker = EmbeddedBroker(host, port, access_of(cluster, device))
        stack.callback(broker.close)
        stack.callback(_Advertiser(cluster, host, port).close)
        yield broker


class _Advertiser:
    """Advertises the broker at the addresses that this device has, which may be others by and by."""

    def __init__(self, cluster: Cluster, host: str, port: int) -> None:
        self._cluster, self._host, self._port = cluster, host, port
        self._addresses: list[str] = []  # that are advertised, or could not be
        self._advertised, self._ended = contextlib.ExitStack(), threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._keep_looking, name="edge-run advertiser", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Advertise it no more."""
        self._ended.set()
        self._thread.join()
        self._advertised.close()

    def _keep_looking(self) -> None:
        while not self._ended.wait(LOOK_S):
            with contextlib.suppress(OSError):  # no files are left now
                self._look()

    def _look(self) -> None:
        addresses = [one for one in own_addresses(self._host) if not is_loopback(one)]
        if addresses == self._addresses:
            return
        self._addresses = addresses
        self._advertised.close()
        if addresses:
            try:
                advertisement = Advertisement(self._cluster.id, self._cluster.founder, addresses, self._port)
                self._advertised.callback(advertisement.close)
            except MeshError as error:  # as on a network without multicast: the plain address works
                logger.warning("%s; devices find it by its address only", error)


def access_of(cluster: Cluster, device: DeviceKey) -> BrokerAccess:
    """Return whom the broker of `cluster`, on `device`, lets in: members, who has an invitation, and Home Assistant.

    Each has a password of its own. An invitation that has long ended is not let in; one that ended lately is, to be
    told so, as clocks differ.
    """
    name, listed = cluster.id, cluster.listed
    users = {HOME: home_user(name, home_password(cluster, device))}
    computing = partial(member_user, leads=False)
    invited = [one for one in listed.roll.invitations if not one.has_long_ended(time.time())]
    keys = [(one.node, one.seal_key, guest_user) for one in invited]
    keys += [
        (one.node, one.seal_key, computing if one.role == "compute" else member_user) for one in listed.roll.members
    ]
    for node, seal_key, user in keys:
        with contextlib.suppress(NotTrusted):  # whose key is none has no password, and stays outside
            users[node] = user(name, broker_password(device, name, seal_key))
    return BrokerAccess(users)


def home_password(cluster: Cluster, device: DeviceKey) -> str:
    """Return the password of Home Assistant at the broker of `cluster`, on `device`."""
    return broker_password(device, cluster.id, device.seal_key)
