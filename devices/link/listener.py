"""The socket on which the data link listens, and the check of who may connect to it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from edge_run.base.errors import MeshError, ProtocolError
from edge_run.base.extras import MESH, need
from edge_run.base.mesh import Message
from edge_run.devices.link.connection import HEARTBEAT_S, OPEN_S, SILENCE_S, Keys
from edge_run.devices.link.frames import MOST_FRAME_BYTES, FrameKind, Head, pack, parts_of, unpack

if TYPE_CHECKING:
    import zmq

_ZAP = "inproc://zeromq.zap.01"
SEAL_BYTES = 64  # more than encryption adds to a frame
_QUEUE = 64  # messages of a peer that wait in the socket
_EVENT = struct.Struct("=HI")  # of ZeroMQ's monitor: its kind, and the descriptor


class LinkListener:
    """Listens, and lets in peers that show the key of a member. Used by the link's thread only, once it is made."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys, places: Sequence[str], port: int) -> None:
        """Listen on the addresses `places`, all on one port; 0: any that is free. Raises MeshError."""
        zmq = need("zmq", MESH)
        self._zmq = zmq
        self._connections: dict[int, str] = {}  # descriptors that are open, and who spoke by them last
        self.guard = context.socket(zmq.ROUTER)
        self.guard.setsockopt(zmq.LINGER, 0)
        self.guard.bind(_ZAP)
        self.socket = context.socket(zmq.ROUTER)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, int(any(":" in place for place in places))),
            (zmq.RCVHWM, _QUEUE),
            (zmq.SNDHWM, _QUEUE),
            (zmq.MAXMSGSIZE, MOST_FRAME_BYTES + SEAL_BYTES),
            (zmq.HEARTBEAT_IVL, int(4 * HEARTBEAT_S * 1e3)),
            (zmq.HEARTBEAT_TIMEOUT, int(4 * SILENCE_S * 1e3)),
            (zmq.HANDSHAKE_IVL, int(OPEN_S * 1e3)),
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_SECRETKEY, keys.secret),
        ):
            self.socket.setsockopt(option, value)
        try:
            self.port = self._listen(places, port)
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise MeshError(
                f"data link: cannot listen on {', '.join(places)}, port {port or 'any'} ({error}); "
                "give another port, or an address of this device"
            ) from error

    def check_key(self, nodes: Mapping[bytes, str]) -> bool:
        """Answer the next who asks to come in; return whether he may. `nodes`: members by their keys in Z85.

        Whoever is not known may become so in a moment, when his announcement arrives; he comes again by himself.
        """
        frames = self.guard.recv_multipart(self._zmq.NOBLOCK)
        envelope, request = frames[: frames.index(b"") + 1], frames[frames.index(b"") + 1 :]
        version, identifier, *rest = request
        is_curve = len(rest) == 5 and rest[3] == b"CURVE" and len(rest[4]) == 32
        node = nodes.get(need("zmq.utils.z85", MESH).encode(rest[4])) if is_curve else None
        status, text = (b"200", b"OK") if node else (b"400", b"no member's key")
        self.guard.send_multipart([*envelope, version, identifier, status, text, (node or "").encode(), b""])
        return node is not None

    def next(self) -> tuple[Head, Message, int] | None:
        """Return the next message: its head, itself, its bytes; None when there is none, or it was a probe.

        Raises ProtocolError for what is malformed, which names the node.
        """
        self.watch()
        try:
            frames = self.socket.recv_multipart(self._zmq.NOBLOCK, copy=False)
        except self._zmq.Again:
            return None
        identity, rest = frames[0], frames[1:]
        node = str(rest[0].get("User-Id")) if rest else ""
        if rest and (descriptor := int(rest[0].get(self._zmq.SRCFD))) in self._connections:
            self._connections[descriptor] = node
        try:
            if not rest:
                raise ProtocolError("message: of no frames")
            head = unpack(rest[0].buffer)
            parts = parts_of(head, [frame.buffer for frame in rest[1:]])
        except ProtocolError as error:
            raise ProtocolError(str(error), node=node) from None
        if head.kind is FrameKind.PROBE:
            echo = pack(Head(FrameKind.ECHO, head.connection_number, head.sequence, {}))
            self.socket.send_multipart([identity.bytes, echo], self._zmq.NOBLOCK)
            return None
        return head, Message(node, head.header, parts), sum(head.sizes)

    def watch(self) -> None:
        """Note which connections came and went: a descriptor that is closed may be anybody's in a moment."""
        while True:
            try:
                event = self.monitor.recv_multipart(self._zmq.NOBLOCK)[0]
            except self._zmq.Again:
                return
            kind, descriptor = _EVENT.unpack(event)
            if kind == self._zmq.EVENT_ACCEPTED:
                self._connections[descriptor] = ""
            else:
                self._connections.pop(descriptor, None)

    def cut(self, node: str) -> None:
        """End the connections by which messages of `node` came."""
        for descriptor in [one for one, owner in self._connections.items() if owner == node]:
            with contextlib.suppress(OSError):
                own = os.dup(descriptor)
                self.watch()  # that a connection is closed is told before: if it was not told, it is what was copied
                if self._connections.pop(descriptor, None) == node:
                    _shut_down(own)
                else:
                    os.close(own)

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(self._zmq.ZMQError):
            self.socket.disable_monitor()
        self.monitor.close(0)
        self.guard.close(0)
        self.socket.close(0)

    def _listen(self, places: Sequence[str], port: int) -> int:
        for place in places:
            host = f"[{place}]" if ":" in place else place
            if port:
                self.socket.bind(f"tcp://{host}:{port}")
            else:
                port = self.socket.bind_to_random_port(f"tcp://{host}")
        return port


def _shut_down(descriptor: int) -> None:
    """End the connection of `descriptor`, and close that. Raises OSError where it is none any more."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise
    with connection:
        connection.shutdown(socket.SHUT_RDWR)
