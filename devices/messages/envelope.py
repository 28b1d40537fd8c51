"""Envelopes of control messages: signed by a member, and bound to a topic and to one start of the sender.

    version (1) | node's key (32) | device's key (32) | device's signature of the node's key (64) |
    proof of the secret (32) | signature (64) | body, canonical JSON

The signature covers the topic and everything else. Every message introduces its sender, and no message of a sender
that is not a member reaches the JSON parser: the sender must prove that it knows the secret, and its device must be in
the list of members. `Gate` lets each message pass once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from edge_run.base.errors import NotTrusted, ProtocolError
from edge_run.base.fields import Document
from edge_run.base.protocols import Clock
from edge_run.base.strict_json import parse
from edge_run.devices.members.cluster import PROOF_BYTES, Cluster
from edge_run.devices.members.identity import INCARNATION_DIGITS, Identity, is_certified
from edge_run.devices.members.keys import KEY_BYTES, SIGNATURE_BYTES, is_signed, node_of
from edge_run.devices.members.member_list import NO_VERSION, Role, Version, canonical
from edge_run.devices.messages.topics import Topic
from edge_run.devices.presence.lease import most_epoch

VERSION = 3
MOST_BYTES = 256 << 10
MOST_MEMBERS = 256
MOST_NUMBER = 1 << 53
CLOCK_TOLERANCE_S = 60.0
_UNSIGNED_BYTES = 1 + 2 * KEY_BYTES + SIGNATURE_BYTES + PROOF_BYTES
_HEAD_BYTES = _UNSIGNED_BYTES + SIGNATURE_BYTES
_FIELDS = {"incarnation", "count", "epoch", "time_ms", "list", "body"}
_LEADERS_KINDS = ("lease", "plan", "cmd")
MOST_OF_DEVICE = 64  # nodes that one device certified, as each of its programs is one: no device takes all places
GRACE_S = 30.0  # how long the secret before the last one is still one: not everybody hears of the change at once


class CameAgain(NotTrusted):
    """A message that was let in before, or is older than one that was."""


@dataclass(eq=False, repr=False, kw_only=True)
class ForeignMessage(NotTrusted):
    """A message in the name of another node, `owner`, than the one that signed or brought it."""

    owner: str


@dataclass(eq=False, repr=False, kw_only=True)
class OtherVersion(ProtocolError):
    """A message of another version of edge-run, `version`."""

    version: int


@dataclass(eq=False, repr=False, kw_only=True)
class ImpossibleEpoch(ProtocolError):
    """A message under an epoch, `epoch`, that cannot have come about."""

    epoch: int


@dataclass(eq=False, repr=False, kw_only=True)
class StaleClock(NotTrusted):
    """A message from another time: replayed, or one of the two clocks is off by `skew_s`."""

    skew_s: float


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a member said.

    incarnation: of its sender.
    count: of the message among those of the incarnation.
    epoch: the latest that its sender knows of.
    time_s: when it was sent, in seconds since 1970.
    body: the words.
    listed: the version of the newest list of members that its sender knows.
    size_bytes: of all of it.
    """

    node: str
    incarnation: str
    count: int
    epoch: int
    time_s: float
    body: Document
    listed: Version = NO_VERSION
    size_bytes: int = 0


@dataclass(slots=True)
class _Sender:
    incarnation: str
    device: bytes
    counts: dict[str, int] = field(default_factory=dict)
    session: int = 0
    heard_s: float = 0.0


class Writer:
    """Makes the envelopes of one identity. Not thread-safe."""

    def __init__(self, identity: Identity, cluster: Cluster, wall_clock: Clock) -> None:
        self._identity, self._wall_clock = identity, wall_clock
        self._count = 0
        self.adopt(cluster)

    def adopt(self, cluster: Cluster) -> None:
        """Write as `cluster` has it from now on: with its secret, and its list of members."""
        key, device = self._identity.public_key, self._identity.device.public_key
        certificate = self._identity.certificate or bytes(SIGNATURE_BYTES)
        self._head = bytes([VERSION]) + key + device + certificate + cluster.proof(key)
        self._listed = list(cluster.version)

    def seal(self, topic: Topic, epoch: int, body: Document) -> tuple[bytes, int]:
        """Return the envelope of `body` for `topic`, and its count. Raises ProtocolError for too much, or no JSON."""
        self._count += 1
        fields = {
            "incarnation": self._identity.incarnation,
            "count": self._count,
            "epoch": epoch,
            "time_ms": int(self._wall_clock() * 1e3),
            "list": self._listed,
            "body": body,
        }
        try:
            content = canonical(fields)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"message for {topic}: is no JSON ({error})") from error
        if _HEAD_BYTES + len(content) > MOST_BYTES:
            raise ProtocolError(f"message for {topic}: has {len(content)} bytes, at most {MOST_BYTES} may be sent")
        return self._head + self._identity.sign(_signed(topic, self._head, content)) + content, self._count


class Gate:
    """Lets in each message that a member signed for this topic, once and only now. Not thread-safe."""

    def __init__(self, cluster: Cluster, wall_clock: Clock) -> None:
        self._cluster, self._wall_clock = cluster, wall_clock
        self._senders: dict[str, _Sender] = {}
        self._certified: dict[bytes, None] = {}
        self._before: tuple[Cluster, float] | None = None  # and since when its secret is none any more

    def adopt(self, cluster: Cluster) -> list[str]:
        """Let in whom `cluster` lists from now on; return the nodes that were let in before, and are no more."""
        if cluster.secret != self._cluster.secret:
            self._before = self._cluster, self._wall_clock()
        self._cluster = cluster
        gone = [node for node, sender in self._senders.items() if not cluster.admits(sender.device)]
        self._certified.clear()
        for node in gone:
            del self._senders[node]
        return gone

    def open(self, topic: Topic, payload: bytes, *, is_kept: bool = False) -> Envelope:
        """Return what `payload` says.

        is_kept: the broker had kept it for us, so it may be old; for topics of epochs only, which cannot go back.
        Raises NotTrusted for what is forged, replayed or stale, ProtocolError for what is malformed or too large.
        """
        node, device, content = self._authenticate(topic, payload)
        envelope = self._with_possible_epoch(_parse(node, content))
        sender = self._senders.get(node)
        if sender is None or envelope.incarnation > sender.incarnation:
            if sender is None:
                self._make_room(node, device)
            sender = _Sender(envelope.incarnation, device)
        elif envelope.incarnation < sender.incarnation:
            raise NotTrusted("a message of an incarnation that ended", node=node)
        if topic.kind == "status" and envelope.body.get("state") == "will":
            return self._accept_will(sender, envelope)
        place = topic.kind if topic.kind == "plan" else str(topic)
        if envelope.count <= sender.counts.get(place, 0):
            raise CameAgain(f"message {envelope.count} for {topic} came again, or late", node=node)
        skew_s = envelope.time_s - self._wall_clock()
        if abs(skew_s) > CLOCK_TOLERANCE_S and not (is_kept and topic.is_kept):
            raise StaleClock(
                f"a message {abs(skew_s):,.0f} s {'ahead of' if skew_s > 0 else 'behind'} this clock, at "
                f"most {CLOCK_TOLERANCE_S:.0f} s are allowed; set the clocks (timedatectl set-ntp true)",
                node=node,
                skew_s=skew_s,
            )
        self._senders[node] = sender
        sender.counts[place], sender.heard_s = envelope.count, self._wall_clock()
        session = envelope.body.get("session")
        if topic.kind == "status" and isinstance(session, int):
            sender.session = session
        return envelope

    def _authenticate(self, topic: Topic, payload: bytes) -> tuple[str, bytes, bytes]:
        """Return who signed, with which device's key, and what. Raises NotTrusted, ProtocolError."""
        if not _HEAD_BYTES < len(payload) <= MOST_BYTES:
            raise ProtocolError(f"message for {topic}: has {len(payload)} bytes, not {_HEAD_BYTES} to {MOST_BYTES}")
        if payload[0] != VERSION:
            raise OtherVersion(
                f"message for {topic}: of version {payload[0]}, this is {VERSION}; update edge-run", version=payload[0]
            )
        head, content = payload[:_UNSIGNED_BYTES], payload[_HEAD_BYTES:]
        key, device = head[1 : 1 + KEY_BYTES], head[1 + KEY_BYTES : 1 + 2 * KEY_BYTES]
        node = node_of(key)
        if not self._is_proven(key, head[-PROOF_BYTES:]):
            raise NotTrusted(f"does not know the secret of cluster {self._cluster.id}", node=node)
        role = self._role(node, key, device, head[1 + 2 * KEY_BYTES : -PROOF_BYTES])
        if role == "compute" and topic.kind in _LEADERS_KINDS:
            raise NotTrusted("its role, compute, does not let it run models on others", node=node)
        if topic.owner is not None and topic.owner != node and topic.kind != "cmd":
            raise ForeignMessage("speaks for another node", node=node, owner=topic.owner)
        if not is_signed(key, payload[_UNSIGNED_BYTES:_HEAD_BYTES], _signed(topic, head, content)):
            raise NotTrusted(f"a message for {topic} that it did not sign so", node=node)
        return node, device, content

    def _is_proven(self, key: bytes, proof: bytes) -> bool:
        if self._cluster.is_proven(key, proof):
            return True
        if self._before is not None and not 0 <= self._wall_clock() - self._before[1] <= GRACE_S:  # it may be put back
            self._before = None
        return self._before is not None and self._before[0].is_proven(key, proof)

    def _role(self, node: str, key: bytes, device: bytes, certificate: bytes) -> Role:
        """Return what the device of a node may do. Raises NotTrusted where it is no member, or not the node's."""
        role = self._cluster.role_of(device)
        if role is None:
            raise NotTrusted(self._cluster.why_not(device), node=node)
        if key + device + certificate not in self._certified:
            if not is_certified(device, certificate, key):
                raise NotTrusted("says that it runs on a device that did not sign for it", node=node)
            if len(self._certified) >= MOST_MEMBERS:
                self._certified.clear()
            self._certified[key + device + certificate] = None
        return role

    def _with_possible_epoch(self, envelope: Envelope) -> Envelope:
        """Return `envelope`, with epoch 0 where its own cannot have come about by our clock, but by one that is ahead.

        Raises ProtocolError where it cannot by any: nobody could ever claim a later one.
        """
        now_s = self._wall_clock()
        if envelope.epoch <= most_epoch(now_s + CLOCK_TOLERANCE_S):
            return envelope
        most = most_epoch(now_s + 2 * CLOCK_TOLERANCE_S)
        if envelope.epoch <= most:
            return replace(envelope, epoch=0)
        raise ImpossibleEpoch(
            f"says epoch {envelope.epoch}, and none after {most} can have come about; it lies, "
            "or the clocks are far apart",
            node=envelope.node,
            epoch=envelope.epoch,
        )

    def _make_room(self, node: str, device: bytes) -> None:
        """Forget who has been silent for so long that the clock refuses all that he ever said."""
        n_own = sum(sender.device == device for sender in self._senders.values())
        if len(self._senders) < MOST_MEMBERS and n_own < MOST_OF_DEVICE:
            return
        limit_s = self._wall_clock() - 2 * CLOCK_TOLERANCE_S
        self._senders = {one: sender for one, sender in self._senders.items() if sender.heard_s > limit_s}
        if len(self._senders) >= MOST_MEMBERS:
            raise ProtocolError(f"is one too many, a cluster has at most {MOST_MEMBERS}", node=node)
        if sum(sender.device == device for sender in self._senders.values()) >= MOST_OF_DEVICE:
            raise ProtocolError(f"is one too many of its device, which has at most {MOST_OF_DEVICE}", node=node)

    def _accept_will(self, sender: _Sender, envelope: Envelope) -> Envelope:
        """Let a will in once, of the connection that its sender has now; it was written when that began."""
        if self._senders.get(envelope.node) is not sender or envelope.count != sender.session:
            raise NotTrusted("the will of a connection that ended", node=envelope.node)
        sender.session = 0
        return envelope


def _signed(topic: Topic, head: bytes, content: bytes) -> bytes:
    return b"edge-run control\0" + str(topic).encode() + b"\0" + head + content


def _parse(node: str, content: bytes) -> Envelope:
    try:
        fields = parse(content)
        if not isinstance(fields, dict) or fields.keys() != _FIELDS or canonical(fields) != content:
            raise ValueError("not as it should be written")
        incarnation, body = fields["incarnation"], fields["body"]
        listed = fields["list"]
        if not isinstance(listed, list) or len(listed) != len(NO_VERSION):
            raise ValueError("no version of a list")
        numbers = [*(fields[name] for name in ("count", "epoch", "time_ms")), *listed]
        if not isinstance(incarnation, str) or len(incarnation) != INCARNATION_DIGITS or not isinstance(body, dict):
            raise ValueError("no incarnation, or no body")
        if any(type(number) is not int or not 0 <= number < MOST_NUMBER for number in numbers):
            raise ValueError("a number that cannot be")
    except ValueError as error:
        raise ProtocolError(f"a malformed message ({error})", node=node) from error
    count, epoch, time_ms, *version = numbers
    listed_version = version[0], version[1], version[2], version[3]
    return Envelope(node, incarnation, count, epoch, time_ms / 1e3, body, listed_version, len(content))
