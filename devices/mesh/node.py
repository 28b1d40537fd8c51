"""This device in a mesh: puts the state machines, the connection to the broker and the data link together.

One lock guards the state. The threads of the channel and of the link, and callers, tell the state what happened while
they hold the lock, and what the state wants sent is sent without waiting. Only callers wait, and each wait has a
deadline.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from random import Random

from edge_run.base.error_codes import error_document
from edge_run.base.errors import DeviceLost, MeshError
from edge_run.base.fields import Document
from edge_run.base.interrupt import go_on, wait_checking
from edge_run.base.mesh import Handler, HasLeft, Member, MeshEvent, WasRemoved, names_apart
from edge_run.devices.link.data_link import DataLink
from edge_run.devices.link.places import AddressFilter
from edge_run.devices.members.cluster import Broker, Cluster
from edge_run.devices.members.identity import Identity
from edge_run.devices.members.list_file import ListFile
from edge_run.devices.members.member_list import MemberList
from edge_run.devices.mesh.channel import Channel, ChannelCallbacks
from edge_run.devices.mesh.clocks import Clocks
from edge_run.devices.mesh.home_assistant import HomeAssistant
from edge_run.devices.mesh.load import LoadReport
from edge_run.devices.mesh.orders import InboundOrder, OrderExecutor
from edge_run.devices.mesh.own_link import OwnLink
from edge_run.devices.mesh.state import MeshState
from edge_run.devices.messages.bodies import check_document, peer_of
from edge_run.devices.messages.outgoing import Outgoing
from edge_run.devices.messages.topics import subscriptions
from edge_run.devices.presence.events import places_of

logger = logging.getLogger(__name__)


class LocalNode:
    """Implements `base.mesh.Mesh`; `edge_run.devices.mesh.opening.open_mesh` makes one.

    It is long because it is all of `Mesh` and all callbacks of three threads: each takes the one lock, tells the state,
    and has done what the state asks for.

    link: the data link to the other members.
    broker: where the broker is, or was last.
    state: what this device knows of its mesh; read it under `held()`.
    """

    def __init__(
        self,
        identity: Identity,
        cluster: Cluster,
        name: str,
        find: Callable[[], Broker],
        file: ListFile,
        places: tuple[str, ...] | None,
        port: int = 0,
    ) -> None:
        """`find` returns where the broker is, `file` keeps the list of members.

        places: where the data link listens; None: it only looks on.
        """
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        is_watching = places is None
        self.state = MeshState(identity, cluster, name, Clocks(time.monotonic, time.time, Random()), is_watching)
        self._version = version("edge-run")
        self._file = file
        self._executor: OrderExecutor | None = None
        self._is_closed = False
        self.broker = ""
        self._own_link = OwnLink(dict)
        self._why_ended = ""  # of the data link or the channel, without which this device takes no part
        self._report = LoadReport(time.monotonic)
        self._places = AddressFilter()
        told = (self._change_link, self._take_control, self._hear_again, partial(self._end, "the data link"))
        self.link = DataLink(places or ("127.0.0.1",), port, *told)
        heard = (self._take_in, self._change_broker, self._pass_time, partial(self._end, "the channel to the broker"))
        callbacks = ChannelCallbacks(find, self._make_will, *heard)
        topics = subscriptions(cluster.id, identity.node, is_watching=is_watching)
        self._channel = Channel(identity.node, topics, callbacks, cluster.authority)

    def start(self, find_link: Callable[[], Document], capabilities: Document) -> None:
        """Begin to connect. find_link: returns where others reach the data link now, as `bodies.peer_of` reads it."""
        check_document(capabilities)
        self._own_link = OwnLink(find_link)
        self.state.describe({**capabilities, "edge_run": self._version}, find_link())
        self._channel.start()

    @property
    def node(self) -> str:
        """This device's id."""
        return self.state.identity.node

    @property
    def cluster(self) -> Cluster:
        """The cluster as it is now, with the newest list of members."""
        return self.state.roster.cluster

    @property
    def places(self) -> tuple[str, ...]:
        """The addresses at which others reach the data link."""
        return places_of(self.state.link)

    @property
    def is_connected(self) -> bool:
        """Whether the broker is there."""
        return self._channel.is_up

    @property
    def problem(self) -> str:
        """Why the broker is not there; empty when it is."""
        return self._why_ended or ("" if self._channel.is_up else self._channel.why_down)

    @contextlib.contextmanager
    def held(self) -> Iterator[MeshState]:
        """Nothing of the state changes in this block; what it asks to have sent is sent at its end."""
        with self._lock:
            yield self.state
            self._carry_on()

    def members(self) -> tuple[Member, ...]:
        """Return who is present, this device included, in order of their ids."""
        with self._lock:
            return self.state.members()

    def wait(self, *, timeout_s: float, check: Callable[[], None] = go_on) -> tuple[MeshEvent, ...]:
        """Return what happened since the last call, waiting until something did; empty when nothing did in time.

        Raises MeshError where this device takes part no more. check: as of `lead`.
        """
        with self._lock:
            wait_checking(self._changed, lambda: self.state.events or self._is_over, timeout_s, check)
            self._check_link()
            events = tuple(self.state.events)
            self.state.events.clear()
            return events

    def wait_connected(self, *, timeout_s: float, check: Callable[[], None] = go_on) -> None:
        """Wait until the broker is there. Raises MeshError, which says why it is not. check: as of `lead`."""
        with self._lock:
            wait_checking(self._changed, lambda: self.is_connected or self._is_over, timeout_s, check)
            self._check_link()
            if not self.is_connected and not self._is_closed:
                raise MeshError(f"mesh: {self._channel.why_down}")

    def announce(self, capabilities: Document) -> None:
        """Say what this device has, or has now. Raises ProtocolError where that is no JSON, or too much."""
        check_document(capabilities)
        with self.held() as state:
            state.describe({**capabilities, "edge_run": self._version})
            state.announce()

    def report(self, load: Document, *, lasts_s: float | None = None) -> None:
        """Say how busy this device is, as base.mesh.Mesh says; once a second at most. Raises as `announce` does."""
        check_document(load)
        with self.held():
            self._report.set(load, lasts_s)

    def report_links(self) -> None:
        """Say anew how busy this device is, with what was measured of the links to others."""
        with self.held():
            self._report.repeat()

    def show_to_home_assistant(self) -> None:
        """Show this device to Home Assistant, over the same broker, from now on."""
        with self.held() as state:
            self._report.show_to(HomeAssistant(self._channel.publish, state.cluster, self.node, state.name))

    def lead(self, *, timeout_s: float, check: Callable[[], None] = go_on) -> int:
        """Take the lease, renew it from then on, and return its epoch, as base.mesh.Mesh says."""
        with self.held() as state:
            self._check_open()
            state.roster.check_leads()
            if not state.lease.held:
                state.want_lease()
        self._channel.hurry()
        epoch = 0
        try:
            with self._lock:
                lease = self.state.lease
                wait_checking(self._changed, lambda: lease.held or self._is_over, timeout_s, check)
                epoch = lease.held
        finally:
            with self.held() as state:
                holder = state.lease.holder
                name = names_apart(state.members()).get(holder or "", f"node {holder}")
                if not epoch:  # Ctrl-C, too: it must not come later, when nobody waits for it
                    state.free_lease()
        if epoch:
            return epoch
        self._check_open()
        self.state.roster.check_leads()
        if not self.is_connected:
            raise MeshError(f"mesh: no lease without the broker ({self._channel.why_down})")
        raise MeshError(
            f"mesh: {name} leads, and went on for {timeout_s:g} s; end its run, or wait"
            if holder
            else f"mesh: the lease could not be had in {timeout_s:g} s; the broker loses messages, see `mesh doctor`"
        )

    def resign(self) -> None:
        """Give the lease back."""
        with self.held() as state:
            state.free_lease()

    def publish_plan(self, epoch: int, plan: Document) -> None:
        """Let everybody see the plan of `epoch`; it is kept for those that join later."""
        with self.held() as state:
            state.publish_plan(epoch, plan)

    def order(self, node: str, order: Document, *, timeout_s: float) -> Document:
        """Have `node` carry out an order under this coordinator's epoch, and return its answer; see base.mesh.Mesh."""
        with self._lock:
            self._check_open()
            state = self.state
            if not state.lease.held:
                raise MeshError("mesh: this device does not lead, so nobody would obey; lead() first")
            incarnation = next((member.incarnation for member in state.members() if member.node == node), None)
            if incarnation is None:
                raise DeviceLost("is no longer there", node=node)
            number, pending = state.outbound.add(node, incarnation, state.lease.held, order)
        try:
            with self.held() as state:
                state.send_order(number)
            with self._lock:
                self._changed.wait_for(lambda: pending.is_done or self._is_over, timeout_s)
        finally:
            with self._lock:
                del state.outbound.pending[number]
        if pending.error is not None:
            raise pending.error
        if pending.answer is None:
            self._check_link()
        if pending.answer is None:
            raise DeviceLost(f"did not answer an order in {timeout_s:g} s", node=node)
        return pending.answer

    def serve(self, handler: Handler) -> None:
        """Answer orders with `handler`, on a thread of its own, one at a time, never one of a past epoch."""
        with self._lock:
            self._check_open()
            if self._executor is not None:
                raise MeshError("mesh: orders are served already")
            self._executor = OrderExecutor(handler, self._obeys, self._answer)

    def close(self) -> None:
        """Leave: say so, stop all threads, close all sockets. Idempotent; after a Ctrl-C it does what is left."""
        if not self._is_closed:
            with self.held() as state:
                state.leave()
                self._report.show(0, is_present=False)
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        self._channel.close()
        self.link.close()
        if self._executor is not None:
            self._executor.close(timeout_s=10)
        self._file.close()
        self.state.identity.release()

    def check_member(self) -> None:
        """Raise NotTrusted where this device was removed from its cluster."""
        if not self.state.roster.is_member:
            why = self.state.roster.cluster.why_not(self.state.identity.device.public_key)
            raise WasRemoved(
                f"mesh: this device {why}; to come back it needs a new line (`edge-run mesh invite`, on a device that "
                "leads) and a new key: remove node.key from its folder of the mesh"
            )

    def publish_list(self) -> None:
        """Let everybody have the list of members as it is kept here, also who may have heard it."""
        with self.held() as state:
            state.say_list()

    def wait_list_heard(self, *, timeout_s: float) -> MemberList | None:
        """Wait until the broker hands back the list as it is kept here, and return it; None where it does not."""
        with self._lock:
            roster = self.state.roster
            self._changed.wait_for(lambda: roster.is_heard or self._is_closed, timeout_s)
            return roster.listed if roster.is_heard else None

    @property
    def _is_over(self) -> bool:
        """Whether this device takes part no more."""
        return self._is_closed or bool(self._why_ended)

    def _check_open(self) -> None:
        if self._is_closed:
            raise HasLeft("mesh: is closed")
        self.check_member()
        self._check_link()

    def _check_link(self) -> None:
        if self._why_ended:
            raise HasLeft(f"mesh: {self._why_ended}; this device has left, start it anew")

    def _obeys(self, node: str, epoch: int) -> bool:
        with self._lock:
            return self.state.lease.obeys(node, epoch)

    def _answer(self, inbound: InboundOrder, answer: Document) -> None:
        with self.held() as state:
            state.answer(inbound, answer)

    # What follows is called on the channel's thread and the link's.

    def _make_will(self) -> Outgoing:
        with self._lock:
            return self.state.make_will()

    def _take_in(self, topic: str, payload: bytes, is_kept: bool) -> None:
        with self.held() as state:
            state.take_in(topic, payload, is_kept=is_kept)

    def _take_control(self, node: str, topic: str, payload: bytes) -> None:
        with self.held() as state:
            state.take_in(topic, payload, sender=node)

    def _change_broker(self, is_up: bool, where: str) -> None:
        with self.held() as state:
            state.connect(is_up)
            if is_up:
                self.broker = where
                self._own_link.look_soon()
                self._report.introduce()

    def _change_link(self, node: str, is_up: bool, why: str) -> None:
        with self.held() as state:
            state.change_link(node, is_up, why)
        self._channel.hurry()

    def _end(self, what: str, why: str) -> None:
        """Leave: who is not reached, or says nothing any more, is not to be counted on."""
        with self.held() as state:
            self._why_ended = f"{what} ended ({why})"
            state.leave()
        self._channel.close()

    def _hear_again(self, node: str) -> None:
        with self.held() as state:
            state.hear_again(node)

    def _pass_time(self) -> float:
        written = self._file.changed()
        with self.held() as state:
            if written is not None:
                state.take_file(written)
            self._own_link.tell(state)
            wait_s = state.pass_time()
            self._report.pass_time()
            due_s = self._report.wait_s()
            if not due_s:
                state.report(self._report.take(self.link.rates(), len(state.members())))
            return min(wait_s, due_s or wait_s)

    def _carry_on(self) -> None:
        """Do what the state asks for, and wake who waits; the lock is held, and nothing here waits."""
        state = self.state
        due = state.take_due()
        if due.is_list_new:
            self._file.keep(state.roster.cluster)
        for message in due.outgoing:
            is_sent = not message.is_direct and self._channel.publish(message)
            if not is_sent and message.node is not None:
                self.link.send_control_soon(message.node, str(message.topic), message.payload)
        for one in due.inbound_orders:
            if self._executor is not None:
                self._executor.give(one)
            else:
                state.answer(one, error_document(MeshError("this device carries out no orders")))
        if due.is_reconnecting:
            logger.warning("this device does not hear itself through broker %s; it connects anew", self.broker)
            self._channel.reconnect()
        if state.is_urgent:
            self._channel.hurry()
        for node in due.unlinked:
            self.link.drop(node, "it left the mesh, or was started anew")
        for node in due.sent_away:
            self.link.send_away(node)
        self._update_link()
        self._changed.notify_all()

    def _update_link(self) -> None:
        state = self.state
        found = {node: state.membership.link_of(node) for node in state.membership.present()}
        peers = {node: peer_of(node, *where, self._places) for node, where in found.items() if where is not None}
        self.link.set_peers({node: peer for node, peer in peers.items() if peer is not None})
        self.link.hold(state.lease.holder is not None)
