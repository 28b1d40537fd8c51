"""Finds the broker on a local network by multicast DNS, for join lines that name no address.

The announcement does not contain the cluster's id. It contains a word made from the founder's key, or from the secret
of a cluster that has no list of members, so that only a device with a join line recognises the cluster.
"""

from __future__ import annotations

import hashlib
import ipaddress
import threading
from typing import Any

from edge_run.base.errors import MeshError
from edge_run.base.extras import MESH, need
from edge_run.devices.members.cluster import Broker, Cluster

SERVICE = "_edge-run._tcp.local."
SEARCH_S = 3.0


class Advertisement:
    """Says on the local network where the broker of a cluster is, until it is closed."""

    def __init__(self, cluster: Cluster, addresses: list[str], port: int) -> None:
        """`addresses`: of this device, at which the broker listens."""
        zeroconf = need("zeroconf", MESH)
        self._zeroconf = zeroconf.Zeroconf(interfaces=addresses)
        self._info = zeroconf.ServiceInfo(
            SERVICE,
            f"{_word(cluster)}.{SERVICE}",
            port=port,
            addresses=[ipaddress.ip_address(address).packed for address in addresses],
        )
        self._zeroconf.register_service(self._info)

    def close(self) -> None:
        """Say that it is no longer there."""
        self._zeroconf.unregister_service(self._info)
        self._zeroconf.close()


def find_broker(cluster: Cluster, search_s: float = SEARCH_S, interfaces: list[str] | None = None) -> Broker:
    """Return where the broker of `cluster` is. Raises MeshError when nobody on the local network says so."""
    zeroconf = need("zeroconf", MESH)
    wanted, found = f"{_word(cluster)}.{SERVICE}", threading.Event()

    def note(name: str, state_change: Any, **_: Any) -> None:
        if name == wanted and state_change is not zeroconf.ServiceStateChange.Removed:
            found.set()

    own = zeroconf.Zeroconf(interfaces=interfaces or zeroconf.InterfaceChoice.All)
    try:
        browser = zeroconf.ServiceBrowser(own, SERVICE, handlers=[note])
        found.wait(search_s)
        info = own.get_service_info(SERVICE, wanted, timeout=int(search_s * 1e3)) if found.is_set() else None
        browser.cancel()
    finally:
        own.close()
    if info is None or not info.parsed_addresses():
        raise MeshError(
            f"mesh: no broker of cluster {cluster.id} was found on this network in {search_s:g} s; start it, or name "
            "its address with --broker mqtt://HOST"
        )
    return Broker(info.parsed_addresses()[0], info.port)


def _word(cluster: Cluster) -> str:
    word = hashlib.sha256(b"edge-run discovery" + cluster.founder).hexdigest() if cluster.founder else ""
    return f"edge-run-{(word or cluster.derive('discovery'))[:16]}"
