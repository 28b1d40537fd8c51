"""All that a device knows of its mesh, without I/O: list of members, membership, lease, orders, plans and loads.

Messages and moments go in. The work that follows from them comes out of `take_due`, and `events` has what the user of
the mesh is to be told; `node.py` fetches both. Clocks and chance are passed in. Not thread-safe.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

from edge_run.base.errors import EdgeRunError, MeshError, NotTrusted, ProtocolError
from edge_run.base.fields import Document
from edge_run.base.mesh import Lost, Member, MembersChanged, MeshEvent, Unled, add_event
from edge_run.devices.members.cluster import Cluster
from edge_run.devices.members.identity import Identity
from edge_run.devices.members.roster import Roster
from edge_run.devices.mesh.clocks import Clocks
from edge_run.devices.mesh.due import Due
from edge_run.devices.mesh.early import EarlyMessage, EarlyMessages
from edge_run.devices.mesh.orders import InboundOrder, OutboundOrders
from edge_run.devices.mesh.outbox import Outbox
from edge_run.devices.messages import bodies
from edge_run.devices.messages.envelope import MOST_MEMBERS, CameAgain, Envelope, ForeignMessage, Gate
from edge_run.devices.messages.outgoing import Outgoing
from edge_run.devices.messages.refusals import Refusals
from edge_run.devices.messages.topics import Topic, parse_topic
from edge_run.devices.presence import events
from edge_run.devices.presence import lease as leases
from edge_run.devices.presence.heard import HeardIncarnations
from edge_run.devices.presence.membership import Membership
from edge_run.devices.presence.message_quota import MessageQuota

ANNOUNCE_WITHIN_S, RESEND_S = 0.15, 1.0
MOST_EVENTS, MOST_TIMES = 1000, 1 << 20


class MeshState:
    """What `identity` knows of its mesh.

    It is long because this is where the state machines meet: every message and every moment goes through the gate, the
    list of members, membership, the lease and the orders, in an order that matters.

    roster: the list of members.
    membership: who is present.
    lease: who leads.
    refusals: messages that were not let in.
    outbound: orders that this device gave.
    loads: how busy members said that they are, the latest only.
    plan: the latest plan, with its epoch.
    link: where others reach this device's data link.
    capabilities: what this device has.
    load: how busy this device is.
    events: what is to be told to whoever uses the mesh.
    connections: how often the broker was connected to.
    reconnections: how often that was since this device did not hear itself.
    deaf: members that said that they did not hear themselves through the broker, and how often.
    is_heard: what this device says comes back to it.
    is_urgent: `pass_time` is to be called before the moment that it asked for.
    """

    def __init__(self, identity: Identity, cluster: Cluster, name: str, clocks: Clocks, is_watching: bool) -> None:
        """is_watching: it looks on, and is no member."""
        self.identity, self.name, self._clocks = identity, name, clocks
        self._is_watching = is_watching
        self.roster = Roster(identity, cluster, clocks.steady, clocks.wall, clocks.random)
        self._outbox, self._gate = Outbox(identity, cluster, clocks.wall), Gate(cluster, clocks.wall)
        self.membership = Membership(identity.node, identity.incarnation, clocks.steady)
        self.lease = leases.Lease(identity.node, clocks.steady, clocks.random)
        self.refusals = Refusals()
        self._quota = MessageQuota()
        self.loads: dict[str, Document] = {}
        self.plan: tuple[int, Document] | None = None
        self.outbound = OutboundOrders()
        self.link: Document = {}
        self.capabilities: Document = {}
        self._due = Due()
        self.events: deque[MeshEvent] = deque(maxlen=MOST_EVENTS)
        self._early = EarlyMessages()
        self._is_settling = self._wants_lease = False
        self._announce_s: float | None = None
        self._heard = HeardIncarnations(clocks.steady)
        self.load: Document = {}
        self.connections = self.reconnections = 0
        self.deaf: dict[str, int] = {}
        self.is_heard = self.is_urgent = False

    @property
    def cluster(self) -> str:
        """The id of the cluster."""
        return self.roster.cluster.id

    def members(self) -> tuple[Member, ...]:
        """Return who is present, in order of their ids."""
        places = events.places_of(self.link)
        own = Member(self.identity.node, self.name, self.identity.incarnation, self.capabilities, places)
        found = self.membership.present() | ({} if self._is_watching else {own.node: own})
        return tuple(found[node] for node in sorted(found))

    def take_due(self) -> Due:
        """Return what is to be done now; whoever takes it does it."""
        due, self._due = self._due, Due()
        due.outgoing = self._outbox.take()
        return due

    def describe(self, capabilities: Document, link: Document | None = None) -> None:
        """This device has `capabilities` from now on; others reach its data link as `link` says, or as before."""
        self.capabilities, self.link = capabilities, self.link if link is None else link

    def make_will(self) -> Outgoing:
        """Return what the broker is to say when the next connection breaks."""
        return self._outbox.make_will(self.lease.epoch)

    def take_in(self, text: str, payload: bytes, *, is_kept: bool = False, sender: str | None = None) -> None:
        """Take in a message. sender: who brought it, where it came over the data link. What is not right is refused."""
        try:
            topic = parse_topic(text)
            is_anothers = topic.kind == "cmd" and topic.owner != self.identity.node  # no broker brings us such
            if not payload or topic.cluster != self.cluster or is_anothers:
                return
            if topic.kind == "members":
                self._follow_list(self.roster.take(payload))
                return
            if topic.kind == "join":
                self.roster.ask(payload)
                self.is_urgent = True
                return
            if not self.roster.is_settled and sender is None and self._outbox.is_echo(payload):
                self.roster.hear_self()
                self._settle_down()
            if not self.roster.is_settled:
                self._early.put(EarlyMessage(text, payload, is_kept, sender))
                return
            envelope = self._gate.open(topic, payload, is_kept=is_kept)
            if sender not in (None, envelope.node):
                raise ForeignMessage("brings a message of another node", node=sender or "", owner=envelope.node)
            if self.roster.hear(envelope.listed):
                self._carry_out((events.SendHeartbeat(asks=True),))  # who hears how old our list is says the newer one
            self._understand(topic, envelope, is_kept, is_direct=sender is not None)
        except EdgeRunError as error:
            is_brokers = is_kept and isinstance(error, CameAgain)  # which hands on what it keeps, said already or not
            is_own = isinstance(error, ProtocolError | MeshError) and error.node == self.identity.node
            if not is_brokers and not is_own:
                self.refusals.add(error)

    def connect(self, is_up: bool) -> None:
        """The connection to the broker came, or went."""
        if is_up:
            self._outbox.connect()
        self._carry_out(self.membership.handle(events.BrokerChanged(is_up)))
        if is_up:
            self.connections += 1
            self.roster.connect()
            self._is_settling = True
            self._settle_down()
            for number in self.outbound.pending:
                self.send_order(number)
            if self.lease.held:
                self._send("lease", {"state": "hold"}, epoch=self.lease.held)

    def change_link(self, node: str, is_up: bool, why: str) -> None:
        """The data link to a node came, or went, or cannot be had."""
        if why and not is_up and not self.membership.is_hearing:
            self.outbound.lose(node, f"is reached neither through the broker nor over the data link ({why})")
        self._carry_out(self.membership.handle(events.LinkChanged(node, is_up, why)))

    def hear_again(self, node: str) -> None:
        """A node that is not present said something over the data link."""
        self._carry_out(self.membership.handle(events.Spoke(node)))

    def pass_time(self) -> float:
        """Do what is due; return in how many seconds something may be."""
        self.is_urgent = False
        is_changed, refused = self.roster.pass_time()
        for error in refused:
            self.refusals.add(error)
        self._follow_list(is_changed)
        if self.roster.is_settled:
            self._obey_lease(self.lease.handle(leases.LeaseTick()))
        self._carry_out(self.membership.handle(events.Tick()))
        self._carry_out(self.membership.handle(events.HolderChanged(self.lease.holder)))
        now_s = self._clocks.steady()
        for number, pending in self.outbound.pending.items():
            if not pending.is_done and now_s - pending.sent_s >= RESEND_S:  # its node, or its broker, may be away
                self.send_order(number, is_direct=not pending.is_direct)
                self._carry_out(self.membership.handle(events.Doubted()))
        if self._announce_s is not None and now_s >= self._announce_s:
            self._announce_s = None
            self.announce()
        waits = [self.lease.wait_s, min(1.0, self.membership.heartbeat_s / 3), self.roster.wait_s]
        if self._announce_s is not None:
            waits.append(self._announce_s - now_s)
        return max(0.01, min(waits))

    def announce(self) -> None:
        """Say what this device has."""
        if not self._is_watching:
            body: Document = {
                "name": self.name,
                "capabilities": self.capabilities,
                "link": self.link,
                "heard": self._heard.incarnations(),
            }
            self._send("caps", {**body, "rare": True} if self.membership.is_rare else body)
            if self.load:
                self.report(self.load)

    def report(self, load: Document) -> None:
        """Say how busy this device is."""
        self.load = load
        self._send("load", {"load": load})

    def want_lease(self) -> None:
        """Begin to claim the lease."""
        self._wants_lease = self._is_settling
        if not self._is_settling:
            self._obey_lease(self.lease.handle(leases.Wanted()))

    def free_lease(self) -> None:
        """Give the lease back, or claim it no more."""
        self._wants_lease = False
        self._obey_lease(self.lease.handle(leases.Unwanted()))

    def publish_plan(self, epoch: int, plan: Document) -> None:
        """Let everybody see a plan, and have the broker forget the one before."""
        if self.plan is not None and self.plan[0] != epoch:
            self._outbox.forget_plan(self.plan[0])
        self._send("plan", {"plan": plan}, epoch=epoch)
        self.plan = (epoch, plan)

    def send_order(self, number: int, *, is_direct: bool = False) -> None:
        """Send an order, for the first time or again."""
        pending = self.outbound.pending[number]
        pending.sent_s, pending.is_direct = self._clocks.steady(), is_direct
        self._send("cmd", pending.body, node=pending.node, epoch=pending.epoch, is_direct=is_direct)

    def answer(self, inbound: InboundOrder, answer: Document) -> None:
        """Send the answer of an order that was carried out."""
        body = {"to": inbound.node, "incarnation": inbound.incarnation, "number": inbound.number, **answer}
        self._send("rsp", body, node=inbound.node, is_direct=inbound.is_direct)

    def leave(self) -> None:
        """Say that this device leaves."""
        self.free_lease()
        self._send("status", {"state": bodies.LEFT})
        self._outbox.leave()

    def take_file(self, payload: bytes) -> None:
        """Take in the list that another process of this device has kept."""
        if payload == self.roster.listed.payload:
            return
        with contextlib.suppress(EdgeRunError):  # a file that is damaged is no reason to stop
            is_changed = self.roster.take_own(payload)
            self._follow_list(is_changed)
            if is_changed:
                self.say_list()

    def say_list(self) -> None:
        """Say the list of members as it is."""
        self.roster.say()
        self._say_lists()

    def _follow_list(self, is_changed: bool) -> None:
        """Go by the list as it is now; where it is settled now, take in what came meanwhile."""
        if is_changed:
            self._due.is_list_new = True
            add_event(self.events, MembersChanged())
            self._outbox.adopt(self.roster.cluster)
            for node in self._gate.adopt(self.roster.cluster):
                self._carry_out(self.membership.handle(events.SentAway(node)))
                self._due.sent_away.append(node)
            if self.lease.held and not self.roster.may_lead:  # nobody obeys any more, nor listens to what it says
                self.events.append(Unled(self.lease.held))
                self.lease.handle(leases.Unwanted())
        self._say_lists()
        self._settle_down()

    def _say_lists(self) -> None:
        for payload in self.roster.take_said():
            self._outbox.send_list(payload, self.membership.present())

    def _settle_down(self) -> None:
        """Believe others from now on, where the list is settled, and take in what they said meanwhile."""
        if self._is_settling and self.roster.is_settled:
            self._is_settling = False
            self._obey_lease(self.lease.handle(leases.Connected()))
            if self._wants_lease:
                self.want_lease()
        while self.roster.is_settled and (early := self._early.take()) is not None:
            self.take_in(early.topic, early.payload, is_kept=early.is_kept, sender=early.sender)

    def _understand(self, topic: Topic, envelope: Envelope, is_kept: bool, *, is_direct: bool) -> None:
        node = envelope.node
        if topic.kind == "lease":
            state = envelope.body.get("state")
            if state not in bodies.LEASE_STATES:
                raise ProtocolError("a word about the lease that is none", node=node)
            self._obey_lease(self.lease.handle(leases.Heard(node, envelope.epoch, str(state), is_kept)))
            return
        self._obey_lease(self.lease.handle(leases.EpochHeard(envelope.epoch)))
        self.is_heard |= node == self.identity.node
        if topic.kind in ("status", "caps"):
            self._hear_of(envelope, is_status=topic.kind == "status")
        elif topic.kind == "load":
            if node in self.membership.present():
                load = bodies.document_in(envelope, "load")
                self._quota.take(node, topic.kind, envelope.size_bytes, self.membership.known())
                self.loads[node] = load
        elif topic.kind == "plan":
            if envelope.epoch == topic.epoch and (self.plan is None or topic.epoch >= self.plan[0]):
                self.plan = (topic.epoch, bodies.document_in(envelope, "plan"))
        elif topic.kind == "rsp":
            if (
                envelope.body.get("to") == self.identity.node
                and envelope.body.get("incarnation") == self.identity.incarnation
            ):
                self.outbound.take_answer(node, envelope.body)
        elif topic.owner == self.identity.node:
            number, order = envelope.body.get("number"), bodies.document_in(envelope, "order")
            if not isinstance(number, int):
                raise ProtocolError("an order without a number", node=node)
            if envelope.body.get("incarnation") != self.identity.incarnation:
                raise NotTrusted("an order for another incarnation of this device", node=node)
            self._due.inbound_orders.append(
                InboundOrder(node, envelope.incarnation, envelope.epoch, number, order, is_direct)
            )

    def _hear_of(self, envelope: Envelope, *, is_status: bool) -> None:
        """Take in a heartbeat, a farewell, that somebody looks on, or an announcement."""
        if is_status:
            self._heard.add(envelope.incarnation)
            times = envelope.body.get("deaf")
            if isinstance(times, int) and 0 < times < MOST_TIMES and len(self.deaf) < MOST_MEMBERS:
                self.deaf[envelope.node] = times
        event = bodies.status_event(envelope) if is_status else bodies.announced(envelope, self.identity.incarnation)
        if isinstance(event, events.Announced) and envelope.node != self.identity.node:
            self._quota.take(envelope.node, "caps", envelope.size_bytes, self.membership.known())
        if event is None:
            self._announce_soon()
        else:
            self._carry_out(self.membership.handle(event))

    def _carry_out(self, instructions: Sequence[events.Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, events.EmitEvent):
                self._tell(instruction.event)
            elif isinstance(instruction, events.Unlink):
                self._due.unlinked.append(instruction.node)
            elif isinstance(instruction, events.Announce):
                self._announce_soon()
            elif isinstance(instruction, events.Reconnect):
                self._reconnect()
            elif self._is_watching:
                self._send("status", {"state": bodies.WATCHING})
            else:
                words = {"asks": instruction.asks, "rare": instruction.is_rare}
                said: Document = {word: True for word, is_so in words.items() if is_so}
                if self.reconnections:
                    said = {**said, "deaf": self.reconnections}
                self._send("status", {"state": bodies.HERE, "session": self._outbox.session, **said})

    def _reconnect(self) -> None:
        """Have the broker connected to anew; not where this device looks on, and has no heartbeat to hear."""
        if not self._is_watching:
            self.reconnections += 1
            self._due.is_reconnecting = True

    def _tell(self, event: MeshEvent) -> None:
        add_event(self.events, event)
        if isinstance(event, Lost):
            self.loads.pop(event.node, None)
            self.outbound.lose(event.node, event.why)
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

    def _send(
        self, kind: str, body: Document, *, node: str | None = None, epoch: int | None = None, is_direct: bool = False
    ) -> None:
        if self.roster.is_member:  # else nobody would listen
            epoch = self.lease.epoch if epoch is None else epoch
            self._outbox.send(kind, body, epoch, node=node, is_direct=is_direct)
