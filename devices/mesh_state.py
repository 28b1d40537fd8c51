"""All that a device knows of its mesh, without I/O: gate, membership, lease, orders and the latest of plans and loads.

Messages and moments go in; what is to be sent, told, unlinked and carried out is left in `outgoing`, `events`,
`unlinked` and `given`, for `mesh_node.py` to fetch. Clocks and chance are passed in. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from edge_run.base.errors import EdgeRunError, ProtocolError
from edge_run.base.mesh import Document, Lost, Member, MeshEvent, Unled
from edge_run.devices import mesh_events as events
from edge_run.devices import mesh_lease as leases
from edge_run.devices.mesh_bodies import HERE, LEASE_STATES, LEFT, WATCHING, WILL, announced, document_in, status_event
from edge_run.devices.mesh_cluster import Cluster
from edge_run.devices.mesh_envelope import CameAgain, Envelope, Gate, Writer
from edge_run.devices.mesh_identity import Identity
from edge_run.devices.mesh_membership import Membership
from edge_run.devices.mesh_orders import Asked, Given, Pending
from edge_run.devices.mesh_refusals import Refusals
from edge_run.devices.mesh_topics import Topic, parse_topic

ANNOUNCE_WITHIN_S, RESEND_S = 0.15, 1.0
MOST_EVENTS = 1000


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where time and chance come from: seconds that only grow, seconds since 1970, and a random source."""

    steady: Callable[[], float]
    wall: Callable[[], float]
    random: Random


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to be sent, by the topic.

    node: whom it is for, where it is for one. is_direct: over the data link to it, also while the broker is there.
    """

    topic: Topic
    payload: bytes
    node: str | None = None
    is_direct: bool = False

    @property
    def is_confirmed(self) -> bool:
        """Whether the broker is to confirm it."""
        return self.topic.is_confirmed

    @property
    def is_kept(self) -> bool:
        """Whether the broker keeps it for later comers."""
        return self.topic.is_kept


class MeshState:
    """What `identity` knows. is_watching: it looks on, and is no member."""

    def __init__(self, identity: Identity, cluster: Cluster, name: str, clocks: Clocks, is_watching: bool) -> None:
        self.identity, self._cluster, self.name, self._clocks = identity, cluster, name, clocks
        self._is_watching = is_watching
        self._writer, self._gate = Writer(identity, cluster, clocks.wall), Gate(cluster, clocks.wall)
        self.membership = Membership(identity.node, identity.boot, clocks.steady)
        self.lease = leases.Lease(identity.node, clocks.steady, clocks.random)
        self.refusals = Refusals()
        self.loads: dict[str, Document] = {}
        self.plan: tuple[int, Document] | None = None
        self.asked = Asked()
        self.link: Document = {}
        self.capabilities: Document = {}
        self.outgoing: list[Outgoing] = []
        self.events: deque[MeshEvent] = deque(maxlen=MOST_EVENTS)
        self.unlinked: list[str] = []
        self.given: list[Given] = []
        self._session = 0
        self._announce_s: float | None = None
        self.load: Document = {}
        self.connections = 0
        self.is_heard = False  # what this device says comes back to it
        self.is_urgent = False  # `pass_time` is to be called before it asked for

    @property
    def cluster(self) -> str:
        """The id of the cluster."""
        return self._cluster.id

    def members(self) -> tuple[Member, ...]:
        """Return who is present, in order of their ids."""
        own = Member(self.identity.node, self.name, self.identity.boot, self.capabilities)
        found = self.membership.present() | ({} if self._is_watching else {own.node: own})
        return tuple(found[node] for node in sorted(found))

    def make_will(self) -> Outgoing:
        """Return what the broker is to say when the next connection breaks."""
        topic = self._topic("status")
        payload, self._session = self._writer.seal(topic, self.lease.epoch, {"state": WILL})
        return Outgoing(topic, payload)

    def take_in(self, text: str, payload: bytes, *, is_kept: bool = False, sender: str | None = None) -> None:
        """Take in a message. sender: who brought it, where it came over the data link. What is not right is refused."""
        try:
            topic = parse_topic(text)
            if not payload or topic.cluster != self._cluster.id:
                return
            envelope = self._gate.open(topic, payload, is_kept=is_kept)
            if sender not in (None, envelope.node):
                raise ProtocolError(f"node {sender}: brings a message of node {envelope.node}", node=sender)
            self._understand(topic, envelope, is_kept, is_direct=sender is not None)
        except EdgeRunError as error:
            is_brokers = is_kept and isinstance(error, CameAgain)  # which hands on what it keeps, said already or not
            if not is_brokers and error.figures.get("node") != self.identity.node:
                self.refusals.add(error)

    def connect(self, is_up: bool) -> None:
        """The connection to the broker came, or went."""
        self._carry_out(self.membership.handle(events.BrokerChanged(is_up)))
        if is_up:
            self.connections += 1
            self._obey_lease(self.lease.handle(leases.Connected()))
            for number in self.asked.pending:
                self.send_order(number)
            if self.lease.held:
                self._send("lease", {"state": "hold"}, epoch=self.lease.held)

    def change_link(self, node: str, is_up: bool, why: str) -> None:
        """The data link to a node came, or went."""
        self._carry_out(self.membership.handle(events.LinkChanged(node, is_up, why)))

    def pass_time(self) -> float:
        """Do what is due; return in how many seconds something may be."""
        self.is_urgent = False
        self._obey_lease(self.lease.handle(leases.Tick()))
        self._carry_out(self.membership.handle(events.Tick()))
        self._carry_out(self.membership.handle(events.PaceChanged(self.lease.holder)))
        now_s = self._clocks.steady()
        for number, pending in self.asked.pending.items():
            if not pending.is_done and now_s - pending.sent_s >= RESEND_S:  # its node, or its broker, may be away
                self.send_order(number, is_direct=not pending.is_direct)
        if self._announce_s is not None and now_s >= self._announce_s:
            self._announce_s = None
            self.announce()
        waits = [self.lease.wait_s, min(1.0, self.membership.beat_s / 3)]
        if self._announce_s is not None:
            waits.append(self._announce_s - now_s)
        return max(0.01, min(waits))

    def announce(self) -> None:
        """Say what this device has."""
        if not self._is_watching:
            body: Document = {"name": self.name, "capabilities": self.capabilities, "link": self.link}
            self._send("caps", {**body, "rare": True} if self.membership.is_rare else body)
            if self.load:
                self.report(self.load)

    def report(self, load: Document) -> None:
        """Say how busy this device is."""
        self.load = load
        self._send("load", {"load": load})

    def want_lease(self) -> None:
        """Begin to claim the lease."""
        self._obey_lease(self.lease.handle(leases.Wanted()))

    def free_lease(self) -> None:
        """Give the lease back, or claim it no more."""
        self._obey_lease(self.lease.handle(leases.Unwanted()))

    def publish_plan(self, epoch: int, plan: Document) -> None:
        """Let everybody see a plan, and have the broker forget the one before."""
        if self.plan is not None and self.plan[0] != epoch:
            self.outgoing.append(Outgoing(Topic(self._cluster.id, "plan", epoch=self.plan[0]), b""))
        self._send("plan", {"plan": plan}, epoch=epoch)
        self.plan = (epoch, plan)

    def send_order(self, number: int, *, is_direct: bool = False) -> None:
        """Send an order, for the first time or again."""
        pending: Pending = self.asked.pending[number]
        pending.sent_s, pending.is_direct = self._clocks.steady(), is_direct
        self._send("cmd", pending.body, owner=pending.node, epoch=pending.epoch, is_direct=is_direct)

    def answer(self, given: Given, answer: Document) -> None:
        """Send the answer of an order that was carried out."""
        body = {"to": given.node, "life": given.boot, "number": given.number, **answer}
        self._send("rsp", body, to=given.node, is_direct=given.is_direct)

    def leave(self) -> None:
        """Say that this device leaves."""
        self.free_lease()
        self._send("status", {"state": LEFT})

    def obeys(self, node: str, epoch: int) -> bool:
        """Whether an order is of the coordinator, and of no past epoch."""
        return self.lease.obeys(node, epoch)

    def _understand(self, topic: Topic, envelope: Envelope, is_kept: bool, *, is_direct: bool) -> None:
        node = envelope.node
        if topic.kind == "lease":
            state = envelope.body.get("state")
            if state not in LEASE_STATES:
                raise ProtocolError(f"node {node}: a word about the lease that is none", node=node)
            self._obey_lease(self.lease.handle(leases.Heard(node, envelope.epoch, str(state), is_kept)))
            return
        self._obey_lease(self.lease.handle(leases.EpochHeard(envelope.epoch)))
        self.is_heard |= node == self.identity.node
        if topic.kind == "status":
            event = status_event(envelope)
            if event is None:
                self._announce_soon()
            else:
                self._carry_out(self.membership.handle(event))
        elif topic.kind == "caps":
            self._carry_out(self.membership.handle(announced(envelope)))
        elif topic.kind == "load":
            if node in self.membership.present():
                self.loads[node] = document_in(envelope, "load")
        elif topic.kind == "plan":
            if envelope.epoch == topic.epoch and (self.plan is None or topic.epoch >= self.plan[0]):
                self.plan = (topic.epoch, document_in(envelope, "plan"))
        elif topic.kind == "rsp":
            if envelope.body.get("to") == self.identity.node and envelope.body.get("life") == self.identity.boot:
                self.asked.take_answer(node, envelope.body)
        elif topic.owner == self.identity.node:
            number, order = envelope.body.get("number"), document_in(envelope, "order")
            if not isinstance(number, int):
                raise ProtocolError(f"node {node}: an order without a number", node=node)
            self.given.append(Given(node, envelope.boot, envelope.epoch, number, order, is_direct))

    def _carry_out(self, instructions: Sequence[events.Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, events.Tell):
                self._tell(instruction.event)
            elif isinstance(instruction, events.Unlink):
                self.unlinked.append(instruction.node)
            elif isinstance(instruction, events.Announce):
                self._announce_soon()
            elif self._is_watching:
                self._send("status", {"state": WATCHING})
            else:
                words = {"asks": instruction.asks, "rare": instruction.is_rare}
                said: Document = {word: True for word, is_so in words.items() if is_so}
                self._send("status", {"state": HERE, "session": self._session, **said})

    def _tell(self, event: MeshEvent) -> None:
        self.events.append(event)
        if isinstance(event, Lost):
            self.loads.pop(event.node, None)
            self.asked.lose(event.node, event.why)
            self._obey_lease(self.lease.handle(leases.HolderLost(event.node)))

    def _obey_lease(self, instructions: Sequence[leases.Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, leases.Say):
                self._send("lease", {"state": instruction.state}, epoch=instruction.epoch)
            elif isinstance(instruction, leases.Withdrawn):
                self.events.append(Unled(instruction.epoch))

    def _announce_soon(self) -> None:
        """Announce in a moment: when one device starts, all others answer."""
        if self._announce_s is None and not self._is_watching:
            self._announce_s = self._clocks.steady() + self._clocks.random.uniform(0, ANNOUNCE_WITHIN_S)
            self.is_urgent = True

    def _topic(self, kind: str, owner: str | None = None, epoch: int = 0) -> Topic:
        owner = None if kind in ("lease", "plan") else owner or self.identity.node
        return Topic(self._cluster.id, kind, owner, epoch if kind == "plan" else 0)

    def _send(
        self,
        kind: str,
        body: Document,
        *,
        owner: str | None = None,
        epoch: int | None = None,
        to: str | None = None,
        is_direct: bool = False,
    ) -> None:
        epoch = self.lease.epoch if epoch is None else epoch
        topic = self._topic(kind, owner, epoch)
        payload, _ = self._writer.seal(topic, epoch, body)
        self.outgoing.append(Outgoing(topic, payload, to or owner, is_direct))
