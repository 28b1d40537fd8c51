"""Finds the broker on a local network by multicast DNS, for join lines that name no address.

The announcement does not contain the cluster's id. It contains a word made from the founder's key, so that only a
device with a join line recognises the cluster. That is the first founder's key, also where the cluster was handed on:
join lines of the heir have it too, and it is announced by the device that runs the broker, whoever leads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import logging
import selectors
import socket
import threading
import time
from functools import partial
from typing import Any

from edge_run.base.errors import MeshError, wording
from edge_run.base.extras import MESH, need
from edge_run.devices.members.cluster import Broker

logger = logging.getLogger(__name__)

SERVICE = "_edge-run._tcp.local."
SEARCH_S, ANSWER_S = 3.0, 2.0


class Advertisement:
    """Says on the local network where the broker of a cluster is, until it is closed."""

    def __init__(self, cluster: str, founder: bytes, addresses: list[str], port: int) -> None:
        """`cluster` is its id, `founder` its founder's key. addresses: of this device, at which the broker listens.

        Raises MeshError; then nothing stays open.
        """
        zeroconf = need("zeroconf", MESH)
        with contextlib.ExitStack() as undo:
            try:
                self._zeroconf = zeroconf.Zeroconf(interfaces=addresses)
                undo.callback(self._zeroconf.close)
                self._info = zeroconf.ServiceInfo(
                    SERVICE,
                    f"{_word(founder)}.{SERVICE}",
                    port=port,
                    addresses=[ipaddress.ip_address(address).packed for address in addresses],
                )
                self._zeroconf.register_service(self._info)
            except zeroconf.NonUniqueNameException as error:
                raise MeshError(
                    f"mesh: a broker of cluster {cluster} is announced on this network already; run it on one "
                    "device only"
                ) from error
            except (zeroconf.Error, OSError, ValueError, RuntimeError) as error:
                raise MeshError(f"mesh: the broker cannot be announced on this network ({error!r})") from error
            undo.pop_all()

    def close(self) -> None:
        """Say that it is no longer there, if that can be said; who asks for it then is not answered in any case."""
        refusals = (need("zeroconf", MESH).Error, OSError, RuntimeError)
        for step in (partial(self._zeroconf.unregister_service, self._info), self._zeroconf.close):
            try:
                step()
            except refusals as error:  # no network is up, or too little time is left for it
                logger.info("the end of the broker was not announced: %r", error)


def find_broker(
    cluster: str, founder: bytes, search_s: float = SEARCH_S, interfaces: list[str] | None = None
) -> Broker:
    """Return where the broker of `cluster` is. Raises MeshError when nobody on the local network can say so.

    cluster, founder: as of `Advertisement`. Of several addresses of the broker, some of networks that are not this
    device's, it is one that answers, if any does.
    """
    zeroconf = need("zeroconf", MESH)
    wanted, found = f"{_word(founder)}.{SERVICE}", threading.Event()

    def note(name: str, state_change: Any, **_: Any) -> None:
        if name == wanted and state_change is not zeroconf.ServiceStateChange.Removed:
            found.set()

    try:
        with contextlib.closing(zeroconf.Zeroconf(interfaces=interfaces or zeroconf.InterfaceChoice.All)) as own:
            browser = zeroconf.ServiceBrowser(own, SERVICE, handlers=[note])
            found.wait(search_s)
            info = own.get_service_info(SERVICE, wanted, timeout=int(search_s * 1e3)) if found.is_set() else None
            browser.cancel()
    except (zeroconf.Error, OSError, RuntimeError) as error:  # no network is up, or too little time is left for it
        raise MeshError(
            f"mesh: the broker cannot be looked for on this network ({error!r}); see to the network, or name its "
            f"address with {_naming()}"
        ) from error
    addresses = info.parsed_addresses() if info is not None else []
    if info is None or not addresses or not 0 < (info.port or 0) < 1 << 16:
        raise MeshError(
            f"mesh: no broker of cluster {cluster} was found on this network in {search_s:g} s; start it, or name "
            f"its address with {_naming()}"
        )
    return Broker(_answering(addresses, info.port) or addresses[0], info.port)


def _answering(addresses: list[str], port: int) -> str | None:
    """Return that of `addresses` where something answers first at `port`, None where nothing does in time."""
    until_s = time.monotonic() + ANSWER_S
    with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as stack:
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with contextlib.suppress(OSError):
                one = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                one.setblocking(False)
                if one.connect_ex((address, port)) in (0, errno.EINPROGRESS):
                    waiting.register(one, selectors.EVENT_WRITE, (address, one))
        while waiting.get_map() and (left_s := until_s - time.monotonic()) > 0:
            for key, _ in waiting.select(left_s):
                address, one = key.data
                if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    return str(address)
                waiting.unregister(one)
    return None


def _naming() -> str:
    return wording(
        "`edge-run mesh join --broker mqtt://HOST`", "mesh='mqtt://HOST' or MeshConfig(broker='mqtt://HOST')"
    )


def _word(founder: bytes) -> str:
    return f"edge-run-{hashlib.sha256(b'edge-run discovery' + founder).hexdigest()[:16]}"
