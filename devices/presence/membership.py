"""Who is present: a state machine without I/O. Events in, instructions out, by a clock that is passed in.

A member is present while its own heartbeat is heard, or the data link to it lives; one that was given up, and still
speaks over the link, is back. Silence counts only while this
device hears itself through the broker: when it does not, the broker or the connection to it is gone and nobody else
need be, and members stay for a grace. A broken link or a last will brings the deadline near; a heartbeat takes it back.

Who does not hear itself though its connection is there connects anew, and waits longer each time that this does not
help: a broker may have given the messages to another connection under the same name.

While somebody leads, heartbeats are frequent, but for devices whose links say the same sooner, and for less: a device
that is linked to the leader, and a leader that is linked to all, send heartbeats as if nobody led, and say so.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from edge_run.base.fields import Document
from edge_run.base.mesh import Joined, Lost, Member
from edge_run.base.protocols import Clock
from edge_run.devices.presence.events import (
    Announce,
    Announced,
    BrokerChanged,
    Doubted,
    EmitEvent,
    Event,
    Heartbeat,
    HolderChanged,
    Instruction,
    Left,
    LinkChanged,
    Reconnect,
    SendHeartbeat,
    SentAway,
    Spoke,
    Tick,
    Unlink,
    places_of,
)

GRACE_S = 60.0  # for which nobody is lost while the broker is away
NEAR_S = 1.0  # what is left to someone of whom we heard that he is gone
FIRST_PATIENCE_S, LONGEST_PATIENCE_S = 3.0, 300.0  # with a broker through which we do not hear ourselves


@dataclass(frozen=True, slots=True)
class HeartbeatTiming:
    """How often a device sends a heartbeat, and after how long a silence it is lost.

    heartbeat_s: between two heartbeats.
    lost_s: the silence after which a device is lost.
    """

    heartbeat_s: float
    lost_s: float


IDLE, QUICK = HeartbeatTiming(10.0, 32.0), HeartbeatTiming(1.2, 2.6)


@dataclass(slots=True)
class _Peer:
    incarnation: str
    heard_s: float
    member: Member | None = None
    link: Document = field(default_factory=dict)
    is_present: bool = False
    is_linked: bool = False
    is_rare: bool = False  # it said so: its next heartbeat comes as if nobody led
    due_s: float | None = None  # when it is lost unless it is heard before, which is said to be gone; and why
    why: str = ""
    asked_s: float = 0.0


class Membership:
    """The members as one node sees them: `node`, in `incarnation`.

    It is long because it is one state machine: each event changes who is heard, who is linked and how often heartbeats
    are sent, and only together do these say who is lost.

    is_hearing: whether this device hears itself through the broker.
    is_rare: whether it sends heartbeats as if nobody led, though somebody does.
    """

    def __init__(self, node: str, incarnation: str, clock: Clock) -> None:
        self._node, self._incarnation, self._clock = node, incarnation, clock
        self._peers: dict[str, _Peer] = {}
        self._timing = IDLE
        self._holder: str | None = None
        self._is_up = self.is_rare = False
        self._sent_s = self._echo_s = self._deaf_s = clock()
        self.is_hearing = False
        self._doubted_s: float | None = None  # since when a heartbeat is waited for that was sent for that
        self._patience_s, self._patient_until_s, self._reconnected_s = FIRST_PATIENCE_S, 0.0, clock()

    @property
    def heartbeat_s(self) -> float:
        """How often it sends a heartbeat now."""
        return (IDLE if self.is_rare else self._timing).heartbeat_s

    def present(self) -> dict[str, Member]:
        """Return the other members that are present."""
        return {node: peer.member for node, peer in self._peers.items() if peer.is_present and peer.member is not None}

    def known(self) -> Set[str]:
        """Return the other nodes of which something is kept, also while they are not present."""
        return self._peers.keys()

    def link_of(self, node: str) -> tuple[str, Document] | None:
        """Return the incarnation of a node that may be talked to, and where its data link is."""
        peer = self._peers.get(node)
        return (peer.incarnation, peer.link) if peer is not None and peer.is_present else None

    def handle(self, event: Event) -> list[Instruction]:
        """Take in what happened; return what is to be done."""
        now_s = self._clock()
        if isinstance(event, Tick):
            done = self._pass_time(now_s)
        elif isinstance(event, BrokerChanged):
            done = self._change_broker(event.is_up, now_s)
        elif isinstance(event, HolderChanged):
            done = self._change_holder(event.holder, now_s)
        elif isinstance(event, Doubted):
            done = self._doubt(now_s)
        elif event.node == self._node:
            done = self._hear_self(event, now_s)
        elif isinstance(event, LinkChanged):
            done = self._change_link(event, now_s)
        elif isinstance(event, SentAway):
            done = self._forget(event.node, "it was removed from the cluster")
        elif isinstance(event, Left):
            done = self._part(event, now_s)
        elif isinstance(event, Spoke):
            done = self._hear_again(event.node, now_s)
        else:
            done = self._hear(event, now_s)
        return done

    def _hear(self, event: Heartbeat | Announced, now_s: float) -> list[Instruction]:
        done: list[Instruction] = []
        peer = self._peers.get(event.node)
        if peer is not None and event.incarnation < peer.incarnation:
            return done
        if peer is None or event.incarnation > peer.incarnation:
            done += self._lose(event.node, "it was started anew") if peer is not None else []
            peer = self._peers[event.node] = _Peer(event.incarnation, now_s)
            done.append(Announce())  # whoever starts knows nobody
        peer.heard_s, peer.due_s, peer.why = now_s, None, ""
        peer.is_rare = event.is_rare
        if isinstance(event, Announced):
            places = places_of(event.link)
            member = Member(event.node, event.name, event.incarnation, event.capabilities, places)
            is_new = member != peer.member or not peer.is_present
            if peer.link and event.link.get("key") != peer.link.get("key"):  # the link sees what other addresses mean
                done.append(Unlink(event.node))
            peer.member, peer.link, peer.is_present = member, event.link, True
            return [*done, EmitEvent(Joined(member))] if is_new else done
        if event.asks and Announce() not in done:
            done.append(Announce())
        if peer.member is None:
            if now_s - peer.asked_s > 2.0:
                peer.asked_s = now_s
                done.append(self._heartbeat(now_s, asks=True))
        elif not peer.is_present:
            peer.is_present = True
            done.append(EmitEvent(Joined(peer.member)))
        return done

    def _hear_again(self, node: str, now_s: float) -> list[Instruction]:
        """Have one back who was given up, and whose words still arrive here: who speaks is there."""
        peer = self._peers.get(node)
        if peer is None or peer.member is None or peer.is_present:
            return []
        peer.heard_s, peer.due_s, peer.why, peer.is_present = now_s, None, "", True
        return [EmitEvent(Joined(peer.member))]

    def _doubt(self, now_s: float) -> list[Instruction]:
        """Send a heartbeat out of turn, to know soon whether this device hears itself."""
        if not self.is_hearing or self._doubted_s is not None:
            return []
        self._doubted_s = now_s
        return [self._heartbeat(now_s, asks=False)]

    def _hear_self(self, event: Event, now_s: float) -> list[Instruction]:
        if not isinstance(event, Heartbeat) or event.incarnation != self._incarnation:
            return []
        if not self.is_hearing:
            self._grant_time(now_s)
        if now_s - self._reconnected_s > LONGEST_PATIENCE_S:
            self._patience_s = FIRST_PATIENCE_S
        self._echo_s, self.is_hearing, self._doubted_s = now_s, self._is_up, None
        return []

    def _part(self, event: Left, now_s: float) -> list[Instruction]:
        peer = self._peers.get(event.node)
        if peer is None or peer.incarnation != event.incarnation:
            return []
        if event.is_will:
            self._bring_near(peer, now_s, "its connection to the broker broke")
            return []
        return self._forget(event.node, "it left")

    def _forget(self, node: str, why: str) -> list[Instruction]:
        done = self._lose(node, why) if node in self._peers else []
        self._peers.pop(node, None)
        return done

    def _change_link(self, event: LinkChanged, now_s: float) -> list[Instruction]:
        peer = self._peers.get(event.node)
        if peer is not None:
            was_linked, peer.is_linked = peer.is_linked, event.is_up
            if event.is_up:
                peer.heard_s, peer.due_s, peer.why = now_s, None, ""
            if (was_linked or not self.is_hearing) and not event.is_up and event.why:  # or else its heartbeat is heard
                self._bring_near(peer, now_s, event.why)
        return self._review(now_s)

    def _change_broker(self, is_up: bool, now_s: float) -> list[Instruction]:
        self._is_up = is_up
        if not is_up:
            self._turn_deaf(now_s)
            return []
        self._echo_s, self._patient_until_s = now_s, now_s + self._patience_s
        return [Announce(), self._heartbeat(now_s, asks=True)]

    def _change_holder(self, holder: str | None, now_s: float) -> list[Instruction]:
        timing, has_changed, self._holder = IDLE if holder is None else QUICK, holder != self._holder, holder
        if not has_changed:
            return self._review(now_s)
        for peer in self._peers.values() if holder == self._node else ():
            peer.is_rare = (
                peer.is_rare and peer.is_linked
            )  # it said so of another leader; if it is there, it sends one now
        self._timing = timing
        self._grant_time(now_s)
        self._echo_s = now_s
        self.is_rare = self._may_be_rare()
        return [self._heartbeat(now_s, asks=False)] if self._is_up else []

    def _review(self, now_s: float) -> list[Instruction]:
        """Say so where from now on this device sends heartbeats as if nobody led, or no more."""
        if self.is_rare == self._may_be_rare():
            return []
        self.is_rare, self._echo_s = not self.is_rare, now_s
        self._grant_time(now_s)
        return [self._heartbeat(now_s, asks=False)] if self._is_up else []

    def _may_be_rare(self) -> bool:
        if self._timing is not QUICK:
            return False
        if self._holder == self._node:
            return all(peer.is_linked for peer in self._peers.values() if peer.is_present)
        leader = self._peers.get(self._holder or "")
        return leader is not None and leader.is_present and leader.is_linked

    def _pass_time(self, now_s: float) -> list[Instruction]:
        done: list[Instruction] = []
        every_s = (
            self.heartbeat_s if self.is_hearing else min(self.heartbeat_s, self._patience_s / 3)
        )  # one may be lost
        if self._is_up and now_s - self._sent_s >= every_s:
            done.append(self._heartbeat(now_s, asks=False))
        due_s = self._echo_s + self.heartbeat_s if self._doubted_s is None else self._doubted_s
        if self.is_hearing and now_s - due_s > 1.0:
            self._turn_deaf(now_s)
            self._patient_until_s = now_s + self._patience_s
        elif self._is_up and not self.is_hearing and now_s > self._patient_until_s:
            self._patience_s = min(LONGEST_PATIENCE_S, 2 * self._patience_s)
            self._patient_until_s, self._reconnected_s = now_s + self._patience_s, now_s
            done.append(Reconnect())
        for node, peer in list(self._peers.items()):
            why = self._why_lost(peer, now_s)
            if peer.is_present and why:
                done += self._lose(node, why)
            elif not peer.is_present and now_s - peer.heard_s > GRACE_S + self._timing.lost_s:
                del self._peers[node]
        return done + self._review(now_s)

    def _why_lost(self, peer: _Peer, now_s: float) -> str:
        silent_s = now_s - peer.heard_s
        if peer.is_linked:
            return ""
        if peer.due_s is not None and now_s > peer.due_s:
            return peer.why
        if self.is_hearing:
            return f"silent for {silent_s:.1f} s" if silent_s > self._lost_s(peer) else ""
        is_over = now_s - self._deaf_s > GRACE_S
        return f"the broker has been away for {GRACE_S:.0f} s" if is_over else ""

    def _lose(self, node: str, why: str) -> list[Instruction]:
        peer = self._peers[node]
        was_present, peer.is_present, peer.is_linked, peer.due_s = peer.is_present, False, False, None
        return [Unlink(node), EmitEvent(Lost(node, why))] if was_present else []

    def _lost_s(self, peer: _Peer) -> float:
        """Return after how long a silence a peer is lost: long where heartbeats are rare, here or there."""
        return (IDLE if self.is_rare or peer.is_rare else self._timing).lost_s

    def _bring_near(self, peer: _Peer, now_s: float, why: str) -> None:
        if peer.is_present and not peer.is_linked and peer.due_s is None:
            peer.due_s, peer.why = now_s + NEAR_S, why

    def _turn_deaf(self, now_s: float) -> None:
        if self.is_hearing:
            self.is_hearing, self._deaf_s, self._doubted_s = False, now_s, None

    def _grant_time(self, now_s: float) -> None:
        """Silence until now counts for nothing."""
        for peer in self._peers.values():
            peer.heard_s = now_s

    def _heartbeat(self, now_s: float, asks: bool) -> SendHeartbeat:
        self._sent_s = now_s
        return SendHeartbeat(asks, self.is_rare)

    def check(self) -> None:
        """Assert what always holds; tests call it after every event."""
        assert self._node not in self._peers, "one is not one's own peer"
        for peer in self._peers.values():
            assert not peer.is_present or peer.member is not None, "who is present has said what he is"
            known = peer.member.incarnation if peer.member else peer.incarnation
            assert known == peer.incarnation, "what is known is of this incarnation"
            assert not self.is_hearing or self._is_up, "nothing is heard without a broker"
