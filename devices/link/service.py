"""The thread of the data link: listens, connects to peers, watches the connections, and passes messages on."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from edge_run.base.errors import DeviceLost, ProtocolError
from edge_run.base.extras import MESH, need
from edge_run.base.mesh import LinkRate, Message
from edge_run.devices.link import inbox as link_inbox
from edge_run.devices.link.connection import (
    NOT_NOW,
    PROBE_BYTES,
    RATE_PROBE_BYTES,
    RETRY_S,
    Keys,
    Opening,
    Peer,
    PeerConnection,
)
from edge_run.devices.link.frames import FrameKind, Head
from edge_run.devices.link.inbox import Inbox
from edge_run.devices.link.listener import LinkListener
from edge_run.devices.link.order import MOST_NODES, MessageOrder
from edge_run.devices.link.places import Mark
from edge_run.devices.link.wakeup import Wakeup

logger = logging.getLogger(__name__)

IDLE_S = 30.0
NOT_NOW_S, TELL_S = 0.05, 10.0
_MOST_AT_ONCE = 64  # messages from the listener before the connections are looked at again


class LinkService:
    """What the link's thread does.

    Fields without an underscore are for other threads too. `lock`, which is that of `changed`, guards those from
    `peers` to `is_closed`: whoever changes one holds it, and so does who looks at one from another thread, but for
    `is_closed`, which is never taken back. The others are set once, guard themselves, or are for figures.

    It is long because ZeroMQ's sockets belong to the thread that uses them: whatever touches one is done here.

    keys: of this start of the link.
    peers: the members that may connect, and be connected to.
    connections: those that are open to peers.
    rates: of the links that were measured on request.
    measured_s: when they were.
    failures: why there is no connection to a peer, after one was wanted.
    watched: peers that said something, or are to be watched: their end is told as a loss.
    kept: those that are watched until `unwatch`: the connections to them stay also where nothing is said.
    wanted: peers that are to be connected to, or, with True, only measured.
    dropped: nodes with which the conversation is to end, and why.
    sent_away: nodes whose own connections are to be cut.
    controls: control messages to be sent.
    is_held: connections stay also where nothing is said.
    is_closed: no more is sent or received.
    refused: how many connections and messages were refused.
    inbox: when it is full, nothing more is read from the network.
    bulk: when it is full, what comes for it is dropped.
    """

    def __init__(
        self,
        places: Sequence[str],
        port: int,
        on_change: Callable[[str, bool, str], None],
        on_control: Callable[[str, str, bytes], None],
        on_stranger: Callable[[str], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Listen; the callbacks are called on the link's thread. Raises MeshError.

        on_end: the thread ended though nobody closed the link, and why.
        """
        zmq = need("zmq", MESH)
        self._zmq, self._context = zmq, zmq.Context(io_threads=1)
        self._on_change, self._on_control = on_change, on_control
        self._on_stranger, self._on_end = on_stranger, on_end
        self.keys = Keys(*zmq.curve_keypair())
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.peers: Mapping[str, Peer] = {}
        self.connections: dict[str, PeerConnection] = {}
        self.rates: dict[str, LinkRate] = {}
        self.measured_s: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.watched: set[str] = set()
        self.kept: set[str] = set()
        self.wanted: dict[tuple[str, bool], None] = {}
        self.dropped: dict[str, str] = {}
        self.sent_away: set[str] = set()
        self.controls: deque[tuple[str, str, bytes]] = deque(maxlen=_MOST_AT_ONCE)
        self.is_held = self.is_closed = False
        self.refused = 0
        self.inbox = Inbox(self.wake, link_inbox.MOST_BYTES, link_inbox.MOST_MESSAGES)
        self.bulk = Inbox(lambda: None, link_inbox.MOST_BULK_BYTES, link_inbox.MOST_BULK_MESSAGES)
        self._openings: dict[tuple[str, bool], Opening] = {}
        self._unsent: list[tuple[str, str, bytes]] = []  # control messages for which a connection is being opened
        self._order, self._wakeup = MessageOrder(), Wakeup()
        self._tell_s = 0.0
        try:
            self._listener = LinkListener(self._context, self.keys, places, port)
        except BaseException:
            self._wakeup.close()
            self._context.destroy(0)
            raise
        self.port = self._listener.port
        self._mark = Mark(self.keys.public.decode(), self.port)
        self._thread = threading.Thread(target=self._run, name="edge-run link", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look at what was asked of it."""
        self._wakeup.wake()

    def connection_to(self, node: str) -> PeerConnection | None:
        """Return the connection to `node` in its present incarnation; `changed` is held."""
        connection = self.connections.get(node)
        return connection if connection is not None and connection.leads_to(self.peers.get(node)) else None

    def why_not(self, node: str, is_measure: bool) -> str:
        """Return why there is no connection to `node`, or none yet; `changed` is held."""
        opening = self._openings.get((node, is_measure))
        return self.failures.get(node) or (opening.why_not() if opening else "is not reached in time")

    def watch(self, node: str) -> None:
        """Connect to `node` where there is no connection, and have its end told as a loss."""
        with self.lock:
            self.watched.add(node)
            self.kept.add(node)
            if node in self.connections:
                self.connections[node].is_talked_to = True
            else:
                self.wanted[node, False] = None
        self.wake()

    def unwatch(self, node: str) -> None:
        """Let the connection to `node` end where nothing is said for a while."""
        with self.lock:
            self.kept.discard(node)
        self.wake()

    def close(self) -> None:
        """End the thread and close all. Idempotent."""
        self._say_closed()
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            while not self.is_closed:
                self._poll()
                self._watch_connections()
                self._take_wishes()
                self._advance_openings()
        except Exception as error:
            logger.exception("data link: a mistake of edge-run's own; the link is closed")
            self._on_end(f"a mistake of edge-run's own: {type(error).__name__}: {error}")
        finally:
            self._mark.close()
            self._say_closed()
            for opening in self._openings.values():
                opening.close()
            for connection in self.connections.values():
                connection.close("the link was closed")
            self._listener.close()
            self._context.destroy(0)
            self._wakeup.close()

    def _say_closed(self) -> None:
        with self.lock:
            self.is_closed = True
            self.changed.notify_all()
        self.inbox.close()
        self.bulk.close()

    def _poll(self) -> None:
        """Wait until something is to be done, and take in what came to the listener."""
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        poller.register(self._listener.guard, zmq.POLLIN)
        poller.register(self._listener.monitor, zmq.POLLIN)
        if not self.inbox.is_full:
            poller.register(self._listener.socket, zmq.POLLIN)
        for connection in self.connections.values():
            poller.register(connection.candidate.monitor, zmq.POLLIN)
        for opening in self._openings.values():
            for candidate in opening.candidates:
                poller.register(candidate.monitor, zmq.POLLIN)
                poller.register(candidate.socket, zmq.POLLIN)
        try:
            ready = dict(poller.poll(self._timeout_ms()))
        except zmq.ZMQError as error:
            if error.errno not in NOT_NOW:
                raise
            time.sleep(NOT_NOW_S)
            return
        if self._wakeup.fileno() in ready:
            self._wakeup.clear()
        if self._listener.monitor in ready:
            self._listener.watch()
        if self._listener.guard in ready:
            with contextlib.suppress(zmq.ZMQError):  # who asks is not let in now, and asks again
                self.refused += not self._listener.check_key({p.key.encode(): node for node, p in self.peers.items()})
        if self._listener.socket in ready:
            self._take_in()

    def _timeout_ms(self) -> float | None:
        ends = [min(opening.deadline_s, time.monotonic() + RETRY_S) for opening in self._openings.values()]
        used_s = [connection.used_s for node, connection in self.connections.items() if node not in self.kept]
        if used_s and not self.is_held:
            ends.append(min(used_s) + IDLE_S)
        return max(0.0, (min(ends) - time.monotonic()) * 1e3 + 1) if ends else None

    def _take_in(self) -> None:
        for _ in range(_MOST_AT_ONCE):
            if self.inbox.is_full:
                return
            try:
                found = self._listener.next()
            except ProtocolError as error:
                self.refused += 1
                self._tell(error)
                self._break_up(error.node, "it sent what cannot be")
                return
            except self._zmq.ZMQError as error:  # of whom, nobody knows
                self.refused += 1
                logger.warning("data link: a message was not taken (%s)", error)
                time.sleep(NOT_NOW_S)
                return
            if found is None:
                if not self._listener.socket.get(self._zmq.EVENTS) & self._zmq.POLLIN:
                    return
                continue
            self._hand_on(*found)

    def _tell(self, error: ProtocolError) -> None:
        """Log a refusal, once in a while: who sends what cannot be may send it without end."""
        if time.monotonic() >= self._tell_s:
            self._tell_s = time.monotonic() + TELL_S
            logger.warning("data link: refused, %d so far: %s", self.refused, error)

    def _hand_on(self, head: Head, message: Message, size: int) -> None:
        node = message.node
        if node not in self.peers:
            self._on_stranger(node)
        self._order.forget(self.peers)
        peer = self.peers.get(node)
        if peer is None or head.kind is FrameKind.ECHO:
            self.refused += 1
            if head.kind is not FrameKind.ECHO:  # when it is a peer again, nothing is missing that anybody waits for
                self._order.skip(node, head)
            return
        try:
            if not self._order.take(node, peer.incarnation, head):
                return  # it was still under way on a connection that broke
        except ProtocolError as error:
            self.refused += 1
            self._break_up(node, error.message)
            return
        if head.kind is FrameKind.CONTROL:
            if len(message.parts) == 1 and isinstance(topic := message.header.get("topic"), str):
                self._on_control(node, topic, bytes(message.parts[0]))
            return
        if head.kind is FrameKind.DATA:
            self.inbox.put(message, size)
        elif not self.bulk.is_full:
            self.bulk.put(message, size)
        with self.lock:
            self.watched.add(node)
            own = self.connections.get(node)
            if own is None:  # whoever speaks to us is watched from here too
                self.wanted[node, False] = None
            else:
                own.is_talked_to, own.used_s = True, time.monotonic()

    def _take_wishes(self) -> None:
        with self.lock:
            wanted, self.wanted = self.wanted, {}
            dropped, self.dropped = self.dropped, {}
            peers, away = self.peers, tuple(self.sent_away)
        for node in away:  # again, too: what it had said nothing on was not known to be its
            self._listener.cut(node)
        for node, why in dropped.items():
            self._break_up(node, why)
        for node, is_measure in wanted:
            key = (node, is_measure)
            if node not in peers:
                self._break_up(node, "it is no longer there")  # it is watched, and was lost before that
                continue
            if key in self._openings and self._openings[key].peer != peers[node]:  # it was started anew meanwhile
                self._openings.pop(key).close()
            if key not in self._openings and (is_measure or node not in self.connections):
                sizes = RATE_PROBE_BYTES if is_measure else PROBE_BYTES
                self._openings[key] = Opening(self._context, peers[node], self.keys, sizes, is_patient=is_measure)
        self._send_controls()

    def _send_controls(self) -> None:
        with self.lock:
            waiting, self._unsent = [*self._unsent, *self.controls], []
            self.controls.clear()
            peers = self.peers
        for node, topic, payload in waiting:
            if node in self.connections:
                with contextlib.suppress(DeviceLost):
                    self.connections[node].send(FrameKind.CONTROL, {"topic": topic}, (payload,), time.monotonic())
            elif (node, False) in self._openings or node in peers:
                self._unsent.append((node, topic, payload))
                if (node, False) not in self._openings:
                    self._openings[node, False] = Opening(self._context, peers[node], self.keys)

    def _advance_openings(self) -> None:
        for key, opening in list(self._openings.items()):
            try:
                if not opening.advance():
                    continue
                best = opening.best()
            except (self._zmq.ZMQError, ProtocolError) as error:  # it costs this peer this connection, and nobody else
                self.refused += 1
                opening.failures.append(f"{key[0]}: {error}")
                best = None
            del self._openings[key]
            node, is_measure = key
            opening.close(but=None if is_measure else best)
            with self.lock:
                if best is None:
                    self.failures.pop(node, None)
                    self.failures[node] = opening.why_not()
                    for oldest in list(self.failures)[:-MOST_NODES]:
                        del self.failures[oldest]
                    self._unsent = [one for one in self._unsent if one[0] != node]
                elif is_measure:
                    self.rates[node], self.measured_s[node] = best.rate, time.monotonic()
                else:
                    self.connections[node] = PeerConnection(opening.peer, best, is_talked_to=node in self.watched)
                self.changed.notify_all()
            if not is_measure:
                self._send_controls()
                self._on_change(node, best is not None, "" if best else opening.why_not())

    def _watch_connections(self) -> None:
        now_s = time.monotonic()
        for node, connection in list(self.connections.items()):
            try:
                word = connection.candidate.watch()
            except self._zmq.ZMQError as error:
                self._break_up(node, f"its connection cannot be watched ({error})")
                continue
            if word in ("broken", "refused"):
                self._break_up(node, "the connection broke: it ended, froze, or was cut off")
            elif not connection.leads_to(self.peers.get(node)):
                self._break_up(node, "it is no longer there, was started anew, or has another address")
            elif not self.is_held and node not in self.kept and now_s - connection.used_s > IDLE_S:
                self._end(node, "nothing was said for a while")
                self._on_change(node, False, "")

    def _break_up(self, node: str, why: str) -> None:
        """End the conversation with a peer, also where nothing was sent from here; say so once where there was one."""
        is_watched = node in self.watched
        connection = self._end(node, why)
        if is_watched or (connection is not None and connection.is_talked_to):
            place = f", at {connection.rate.place}" if connection is not None else ""
            loss = DeviceLost(f"{why}{place}", node=node)
            self.inbox.put(loss)
            if not self.bulk.is_full:
                self.bulk.put(loss)
        if connection is not None:
            self._on_change(node, False, why)

    def _end(self, node: str, why: str) -> PeerConnection | None:
        with self.lock:
            self.watched.discard(node)
            self.kept.discard(node)
            connection = self.connections.pop(node, None)
        if connection is not None:
            connection.close(why)
        return connection
