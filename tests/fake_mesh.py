"""A mesh in one process, for tests: members, orders and messages through queues, and devices that die when told to."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from edge_run.base.errors import DeviceLost, MeshError
from edge_run.base.fields import Document
from edge_run.base.interrupt import go_on
from edge_run.base.mesh import Handler, Joined, LinkRate, Lost, Member, MeshEvent, Message
from edge_run.devices.presence.lease import most_epoch

LATE_EPOCH = most_epoch(2.8e9)  # a member may have made up one as late as clocks allow


class Hub:
    """What connects the members."""

    def __init__(self) -> None:
        self.members: dict[str, FakeMesh] = {}
        self.gone: set[str] = set()
        self.epochs, self.incarnations = itertools.count(LATE_EPOCH), itertools.count(1)
        self.lock = threading.Lock()
        self.on_send: Callable[[str, str, Document], None] = lambda source, target, header: None
        # What a device says in place of what it should: a message (from, to, header, parts), an answer (whose, order).
        self.alter: Callable[[str, str, Document, list[bytes]], tuple[Document, list[bytes]]] = lambda s, t, *all: all
        self.alter_answer: Callable[[str, Document, Document], Document] = lambda node, order, answer: answer
        self.can_lead = True
        self.link_bytes_per_s = 1e9  # where `rates` says nothing else
        self.liars: set[str] = set()  # who sends other bytes in bulk than it has
        self.rates: dict[tuple[str, str], LinkRate] = {}
        self.unreached: dict[tuple[str, str], str] = {}  # why the one does not reach the other

    def join(self, node: str) -> FakeMesh:
        mesh = FakeMesh(self, node)
        self.gone.discard(node)
        others = [m for n, m in self.members.items() if n not in self.gone]
        self.members[node] = mesh
        for other in others:
            other.events.put(Joined(mesh.member))
        return mesh

    def kill(self, node: str, *, is_silent: bool = False) -> None:
        """The device is no more; is_silent: and nobody notices, but by its not answering."""
        if node in self.gone:
            return
        self.gone.add(node)
        for other in self.members.values():
            if other.node != node and not is_silent:
                other.put(DeviceLost(f"{node} does not answer", node=node))
                other.bulk.put(DeviceLost(f"{node} does not answer", node=node))
                other.events.put(Lost(node, "it does not answer"))


class FakeMesh:
    """`Mesh` and `Link` in one."""

    def __init__(self, hub: Hub, node: str) -> None:
        self.hub, self.node = hub, node
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.bulk: queue.Queue[Any] = queue.Queue()
        self.events: queue.Queue[MeshEvent] = queue.Queue()
        self.handler: Handler | None = None
        self.capabilities: Document = {}
        self.places: tuple[str, ...] = ()
        self.epoch, self.is_leading, self.incarnation = 0, False, f"incarnation {next(hub.incarnations)}"
        self.orders = threading.Lock()
        self.plans: list[tuple[int, Document]] = []
        self.loads: list[Document] = []
        self.watched: set[str] = set()
        self.hear: Callable[[Message | DeviceLost], None] = lambda item: None
        self.is_wanted: Callable[[Message | DeviceLost], bool] = lambda item: True

    @property
    def link(self) -> FakeMesh:
        return self

    @property
    def member(self) -> Member:
        return Member(self.node, f"name of {self.node}", self.incarnation, self.capabilities, self.places)

    def members(self) -> tuple[Member, ...]:
        alive = (m.member for n, m in sorted(self.hub.members.items()) if n not in self.hub.gone)
        return tuple(alive)

    def wait(self, *, timeout_s: float) -> tuple[MeshEvent, ...]:
        found = []
        while not self.events.empty():
            found.append(self.events.get())
        return tuple(found)

    def announce(self, capabilities: Document) -> None:
        self.capabilities = capabilities
        self._tell()

    def move(self, *places: str) -> None:
        """It is reached at other addresses from now on."""
        self.places = places
        self._tell()

    def _tell(self) -> None:
        for other in self.hub.members.values():
            if other is not self and other.node not in self.hub.gone:
                other.events.put(Joined(self.member))

    def report(self, load: Document, *, lasts_s: float | None = None) -> None:
        self.loads.append(load)

    def lead(self, *, timeout_s: float, check: Callable[[], None] = go_on) -> int:
        check()
        if not self.hub.can_lead:
            raise MeshError("the broker is away")
        self.epoch, self.is_leading = next(self.hub.epochs), True
        return self.epoch

    def resign(self) -> None:
        self.is_leading = False

    def publish_plan(self, epoch: int, plan: Document) -> None:
        self.plans.append((epoch, plan))

    def order(self, node: str, order: Document, *, timeout_s: float) -> Document:
        target = self.hub.members.get(node)
        if target is None or node in self.hub.gone or target.handler is None:
            raise DeviceLost(f"{node}: is not there", node=node)
        if not timeout_s:
            threading.Thread(target=self._have_carried_out, args=(target, order), daemon=True).start()
            raise DeviceLost(f"{node}: did not answer in time", node=node)
        answer = self._have_carried_out(target, order)
        if isinstance(answer, MeshError):
            raise answer
        if node in self.hub.gone:
            raise DeviceLost(f"{node}: died over an order", node=node)
        return self.hub.alter_answer(node, order, answer)

    def _have_carried_out(self, target: FakeMesh, order: Document) -> Document | MeshError:
        assert target.handler is not None
        with target.orders:
            try:
                return target.handler(self.node, self.epoch, order)
            except MeshError as error:
                return error
            except Exception as error:
                refused = MeshError(str(error))
                refused.__cause__ = error
                return refused

    def serve(self, handler: Handler) -> None:
        self.handler = handler

    def close(self) -> None:
        pass

    def send(
        self,
        node: str,
        header: Document,
        parts: Sequence[memoryview] = (),
        *,
        timeout_s: float,
        is_bulk: bool = False,
    ) -> None:
        self.hub.on_send(self.node, node, header)
        if self.node in self.hub.gone:
            time.sleep(0.01)
            return  # a dead device says nothing
        target = self.hub.members.get(node)
        if target is None or node in self.hub.gone:
            raise DeviceLost(f"{node}: is not there", node=node)
        copies = [bytearray(part) for part in parts]
        for part in copies if is_bulk and self.node in self.hub.liars else ():
            part[len(part) // 2] ^= 1
        header, altered = self.hub.alter(self.node, node, header, [bytes(part) for part in copies])
        message = Message(self.node, header, tuple(memoryview(part) for part in altered))
        if is_bulk:
            target.bulk.put(message)
        else:
            target.put(message)

    def put(self, item: Message | DeviceLost) -> None:
        self.hear(item)
        if self.is_wanted(item):
            self.inbox.put(item)

    def overhear(self, hear: Callable[[Message | DeviceLost], None]) -> None:
        self.hear = hear

    def take_only(self, is_wanted: Callable[[Message | DeviceLost], bool]) -> None:
        self.is_wanted = is_wanted

    def watch(self, node: str) -> None:
        self.watched.add(node)  # though all are told of all losses

    def unwatch(self, node: str) -> None:
        self.watched.discard(node)

    def measure(
        self, node: str, *, timeout_s: float, fresh_s: float = 0.0, check: Callable[[], None] = go_on
    ) -> LinkRate:
        check()
        if node in self.hub.gone:
            raise DeviceLost(f"{node}: is not there", node=node)
        if why := self.hub.unreached.get((self.node, node)):
            raise DeviceLost(why, node=node)
        return self.hub.rates.get((self.node, node), LinkRate("", 0.0004, self.hub.link_bytes_per_s))

    def receive(self, *, timeout_s: float, is_bulk: bool = False) -> Message | None:
        try:
            found = (self.bulk if is_bulk else self.inbox).get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(found, DeviceLost):
            raise found
        return found if self.node not in self.hub.gone else None
