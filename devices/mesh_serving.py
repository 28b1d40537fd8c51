"""The embedded broker of the device that serves one, with its advertisement on the local network."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from edge_run.devices.link import LOOPBACK
from edge_run.devices.mesh import EVERYWHERE, own_addresses
from edge_run.devices.mesh_cluster import PORT, Cluster
from edge_run.devices.mesh_discovery import Advertisement
from edge_run.devices.mesh_embedded import EmbeddedBroker, parse_place

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def serving(cluster: Cluster) -> Iterator[None]:
    """Run the broker of `cluster` in this block, where this device is to. Raises MeshError."""
    if cluster.serves is None:
        yield
        return
    host, port = parse_place(cluster.serves, PORT)
    with contextlib.ExitStack() as stack:
        stack.callback(EmbeddedBroker(host, port).close)
        addresses = [one for one in (own_addresses(host) if host in EVERYWHERE else [host]) if one != LOOPBACK]
        if addresses:
            try:
                stack.callback(Advertisement(cluster, addresses, port).close)
            except (OSError, ValueError) as error:  # a network without multicast: the plain address works
                logger.warning("the broker is not announced on the network (%s)", error)
        yield
