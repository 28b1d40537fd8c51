"""What this device says to its mesh: sealed, and left for whoever sends it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from edge_run.base.fields import Document
from edge_run.base.protocols import Clock
from edge_run.devices.members.cluster import Cluster
from edge_run.devices.members.identity import Identity
from edge_run.devices.messages import bodies
from edge_run.devices.messages.envelope import Writer
from edge_run.devices.messages.outgoing import Outgoing
from edge_run.devices.messages.topics import Topic

MOST_SAID = 16


class Outbox:
    """The messages of one node. Not thread-safe.

    session: the number of the will of the present connection to the broker, by which a heartbeat names it.
    """

    def __init__(self, identity: Identity, cluster: Cluster, wall_clock: Clock) -> None:
        self._node, self._cluster = identity.node, cluster.id
        self._writer = Writer(identity, cluster, wall_clock)
        self._waiting: list[Outgoing] = []
        self._said: deque[bytes] = deque(maxlen=MOST_SAID)
        self._has_left = False
        self.session = 0

    def take(self) -> list[Outgoing]:
        """Return what is to be sent; whoever takes it sends it."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def adopt(self, cluster: Cluster) -> None:
        """Seal as `cluster` has it from now on."""
        self._writer.adopt(cluster)

    def connect(self) -> None:
        """There is a new connection to the broker."""
        self._said.clear()

    def is_echo(self, payload: bytes) -> bool:
        """Whether `payload` is of this device's latest, said to all on this connection to the broker."""
        return payload in self._said

    def make_will(self, epoch: int) -> Outgoing:
        """Return what the broker is to say when the next connection breaks."""
        topic = self._topic("status", self._node)
        payload, self.session = self._writer.seal(topic, epoch, {"state": bodies.WILL})
        return Outgoing(topic, payload)

    def send(self, kind: str, body: Document, epoch: int, *, node: str | None = None, is_direct: bool = False) -> None:
        """Have `body` sent under the topic of `kind`.

        epoch: the latest that this device knows of, or that of the plan or lease that `body` is about.
        node: the only one that it is for.
        is_direct: it takes the data link.
        """
        if self._has_left and kind in ("status", "caps"):
            return  # others would take this device for present again
        topic = self._topic(kind, node if kind == "cmd" else self._node, epoch)
        payload, _ = self._writer.seal(topic, epoch, body)
        self._waiting.append(Outgoing(topic, payload, node, is_direct))
        if kind in ("status", "caps"):
            self._said.append(payload)

    def send_list(self, payload: bytes, nodes: Iterable[str]) -> None:
        """Have a list of members, which is signed by itself, sent to the broker and straight to `nodes`."""
        topic = Topic(self._cluster, "members")
        self._waiting.append(Outgoing(topic, payload))
        self._waiting += [Outgoing(topic, payload, node, is_direct=True) for node in nodes]

    def forget_plan(self, epoch: int) -> None:
        """Have the broker forget the plan of `epoch`."""
        self._waiting.append(Outgoing(Topic(self._cluster, "plan", epoch=epoch), b""))

    def leave(self) -> None:
        """From now on this device says no more that it is there."""
        self._has_left = True

    def _topic(self, kind: str, owner: str | None, epoch: int = 0) -> Topic:
        is_owned = kind not in ("lease", "plan")
        return Topic(self._cluster, kind, owner if is_owned else None, epoch if kind == "plan" else 0)
