"""The data link: encrypted messages straight between devices, over ZeroMQ with CURVE.

Each device listens with one socket (`listener.py`) and sends to each peer on a connection of its own
(`connection.py`), which is opened at the first message in either direction. Both sides show the key that their signed
announcement named; any other key is refused. ZeroMQ's own heartbeats tell within 2 s that a peer froze or was cut off.
A connection that breaks is not reused, because messages may be missing: the peer is lost, once, and the next message
opens a new connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edge_run.base.errors import DeviceLost, MeshError, NotTrusted
from edge_run.base.fields import Document
from edge_run.base.interrupt import go_on, wait_checking
from edge_run.base.mesh import LinkRate, Message
from edge_run.devices.link.connection import Peer, PeerConnection
from edge_run.devices.link.frames import FrameKind, check_sizes
from edge_run.devices.link.order import MOST_NODES
from edge_run.devices.link.service import LinkService

LOOPBACK = "127.0.0.1"


class DataLink:
    """This device's end of the link to all members; implements `base.mesh.Link`."""

    def __init__(
        self,
        places: Sequence[str] = (LOOPBACK,),
        port: int = 0,
        on_change: Callable[[str, bool, str], None] = lambda node, is_up, why: None,
        on_control: Callable[[str, str, bytes], None] = lambda node, topic, payload: None,
        on_stranger: Callable[[str], None] = lambda node: None,
        on_end: Callable[[str], None] = lambda why: None,
    ) -> None:
        """Listen on the addresses `places`; port 0: any that is free. Raises MeshError.

        on_change: a connection to a node came, or went or was not found, and why. on_control: a signed control message
        came. on_stranger: somebody who is among the peers no more said something; it is heard if that makes him
        one again. on_end: the link ended though nobody closed it, and why. All are called on the link's thread.
        """
        self._service = LinkService(places, port, on_change, on_control, on_stranger, on_end)
        self._known: dict[str, None] = {}  # the latest last

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._service.port

    @property
    def key(self) -> str:
        """The public key of this incarnation of the link."""
        return self._service.keys.public.decode()

    @property
    def refused(self) -> int:
        """How many connections and messages were refused."""
        return self._service.refused

    def send(
        self,
        node: str,
        header: Document,
        parts: Sequence[memoryview] = (),
        *,
        timeout_s: float,
        is_bulk: bool = False,
    ) -> None:
        """Hand a message to `node`, as base.mesh.Link says."""
        check_sizes([part.nbytes for part in parts])
        deadline_s = time.monotonic() + timeout_s
        kind = FrameKind.BULK if is_bulk else FrameKind.DATA
        try:
            self._connection(node, deadline_s).send(kind, header, parts, deadline_s)
        except DeviceLost:
            if self._service.is_closed:  # which is nobody's fault but this device's
                raise MeshError("data link: is closed") from None
            raise

    def send_control_soon(self, node: str, topic: str, payload: bytes) -> None:
        """Have a signed control message sent, for when the broker is away; it is lost where nothing connects."""
        with self._service.lock:
            self._service.controls.append((node, topic, payload))
        self._service.wake()

    def receive(self, *, timeout_s: float, is_bulk: bool = False) -> Message | None:
        """Return the next message of any node, as base.mesh.Link says."""
        return (self._service.bulk if is_bulk else self._service.inbox).get(timeout_s)

    def overhear(self, hear: Callable[[Message | DeviceLost], None]) -> None:
        """Have `hear` told of what comes, on the link's thread, as base.mesh.Link says."""
        self._service.inbox.overhear(hear)

    def take_only(self, is_wanted: Callable[[Message | DeviceLost], bool]) -> None:
        """Keep only what `is_wanted` from now on, as base.mesh.Link says."""
        self._service.inbox.take_only(is_wanted)

    def watch(self, node: str) -> None:
        """Have the end of `node` told as a loss from now on, as base.mesh.Link says."""
        self._service.watch(node)

    def unwatch(self, node: str) -> None:
        """Let the connection to `node` end where nothing is said for a while, as base.mesh.Link says."""
        self._service.unwatch(node)

    def measure(
        self, node: str, *, timeout_s: float, fresh_s: float = 0.0, check: Callable[[], None] = go_on
    ) -> LinkRate:
        """Measure the link to `node` on a connection of its own, as base.mesh.Link says. Raises DeviceLost, NotTrusted.

        On a link of 5 Mbit/s it takes about a second, on one of 1 Gbit/s a tenth of that.
        """
        service = self._service
        with service.lock:
            measured_s = service.measured_s.get(node)
            if node in service.rates and measured_s is not None and time.monotonic() - measured_s < fresh_s:
                return service.rates[node]
            service.rates.pop(node, None)
            self._ask(node, True, lambda: node in service.rates, timeout_s, check)
            return service.rates[node]

    def rates(self) -> dict[str, LinkRate]:
        """Return what was measured last of the links to peers."""
        with self._service.lock:
            return {
                node: connection.rate for node, connection in self._service.connections.items()
            } | self._service.rates

    def set_peers(self, peers: Mapping[str, Peer]) -> None:
        """Say who is a member, in which incarnation, and where. Who shows a key that another had first is left out."""
        with self._service.lock:
            before = self._service.peers
            owners = {one.key: node for node, one in before.items() if node in peers and peers[node].key == one.key}
            peers = {node: one for node, one in peers.items() if owners.setdefault(one.key, node) == node}
            self._service.sent_away -= peers.keys()  # whose removal was dropped for another change to the list
            if before == peers:
                return
            self._service.peers = peers
            others = [node for node in self._known if node not in peers]
            self._known = dict.fromkeys([*others, *peers][-MOST_NODES:])
            measured: tuple[dict[str, Any], ...] = (self._service.rates, self._service.measured_s)
            unmoved = {node for node, one in peers.items() if node in before and before[node].places == one.places}
            for known in measured:
                for node in known.keys() - unmoved:  # others have gone, too: each run is a node of its own
                    del known[node]
        self._service.wake()

    def drop(self, node: str, why: str) -> None:
        """End the conversation with `node`: it is gone, or started anew."""
        with self._service.lock:
            self._service.dropped[node] = why
        self._service.wake()

    def send_away(self, node: str) -> None:
        """Have the connections that `node` made to this device ended: it is no member any more."""
        with self._service.lock:
            self._service.sent_away.add(node)
        self._service.wake()

    def hold(self, is_held: bool) -> None:
        """Keep connections also where nothing is said for a while: an answer is being made."""
        with self._service.lock:
            if self._service.is_held == is_held:
                return
            self._service.is_held = is_held
        self._service.wake()

    def close(self) -> None:
        """Close all. Idempotent."""
        self._service.close()

    def _connection(self, node: str, deadline_s: float) -> PeerConnection:
        service = self._service
        with service.lock:
            connection = service.connection_to(node)
            if connection is None:
                self._ask(node, False, lambda: service.connection_to(node) is not None, deadline_s - time.monotonic())
                connection = service.connection_to(node)
            assert connection is not None, "there is one, or it was said why not"
            return connection

    def _ask(
        self,
        node: str,
        is_measure: bool,
        is_done: Callable[[], bool],
        timeout_s: float,
        check: Callable[[], None] = go_on,
    ) -> None:
        """Have the thread connect to `node`, or measure the link to it; `changed` is held."""
        service = self._service
        if service.is_closed:
            raise MeshError("data link: is closed")
        if node not in service.peers:
            if node in self._known:
                raise DeviceLost("is no longer there", node=node)
            raise NotTrusted("is no member of this cluster", node=node)
        service.failures.pop(node, None)
        service.wanted[node, is_measure] = None
        service.wake()
        wait_checking(
            service.changed,
            lambda: is_done() or node in service.failures or service.is_closed,
            timeout_s,
            check,
        )
        if not is_done():
            raise DeviceLost(service.why_not(node, is_measure), node=node)
