"""The seam between a mesh and the runs on it: who is there, what is ordered, what is handed over.

`devices/` keeps the mesh (membership, lease, signatures, sockets) and knows nothing of models; `runtime/` runs slices
of models and knows nothing of MQTT. Both speak through these protocols, so either side is tested without the other.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from edge_run.base.errors import DeviceLost, MeshError, NotTrusted
from edge_run.base.fields import Document
from edge_run.base.interrupt import Interrupt, go_on
from edge_run.base.options import require

logger = logging.getLogger(__name__)

MOST_PART_BYTES = 64 << 20  # of a part of a message


class HasLeft(MeshError):
    """This device takes part no more: it closed the mesh, or a thread of it ended. No other device is to blame."""


class WasRemoved(HasLeft, NotTrusted):
    """This device was removed from its cluster."""


@dataclass(frozen=True, slots=True)
class Named:
    """A device.

    node: its id, made from its public key.
    name: what people call it, which need not be its own.
    """

    node: str
    name: str


@dataclass(frozen=True, slots=True)
class Member(Named):
    """A device of the mesh that is present.

    incarnation: the id of this start of it; a later start has the greater one.
    capabilities: what it announced of itself (budgets, rates, numerics, models); the mesh carries that, runs read it.
    places: the addresses at which others reach its data link.
    """

    incarnation: str
    capabilities: Document
    places: tuple[str, ...] = ()


def names_apart(members: Iterable[Named]) -> dict[str, str]:
    """Return what to call each of `members`, by id: its name, with its id where another one has that name too."""
    members = list(members)
    count = Counter(member.name for member in members)
    return {one.node: one.name if count[one.name] == 1 else f"{one.name} ({one.node})" for one in members}


def is_worker(member: Member) -> bool:
    """Return whether a device computes for others: it says which models it has, or how much it may fetch of others."""
    return bool(member.capabilities.get("models") or member.capabilities.get("fetch_bytes"))


@dataclass(frozen=True, slots=True)
class Message:
    """What a member sent over the data link.

    node: who sent it, which is authenticated.
    header: small.
    parts: bulk bytes, each of MOST_PART_BYTES at most.
    """

    node: str
    header: Document
    parts: tuple[memoryview, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkRate:
    """What was measured of the link to a member.

    place: the address.
    round_trip_s: there and back for a few bytes.
    bytes_per_s: in bulk, one way.
    """

    place: str
    round_trip_s: float
    bytes_per_s: float


class Link(Protocol):
    """Messages straight between devices: encrypted, mutual, in order, bounded. Any thread may use it, one at a time.

    is_bulk: of what is not in a hurry, and has a queue of its own; when that is full, what comes is dropped.
    """

    def send(
        self,
        node: str,
        header: Document,
        parts: Sequence[memoryview] = (),
        *,
        timeout_s: float,
        is_bulk: bool = False,
    ) -> None:
        """Hand a message to `node`. Parts may be reused when this returns.

        Raises DeviceLost when the node is not there, or does not take it in time; NotTrusted when it is not a member.
        """
        ...

    def receive(self, *, timeout_s: float, is_bulk: bool = False) -> Message | None:
        """Return the next message of any node, None when none came in time.

        Raises DeviceLost, once for each loss, when a node that was being talked to is no longer there (at most 3 s
        after it stopped answering, whether it died, froze, or was cut off).
        """
        ...

    def overhear(self, hear: Callable[[Message | DeviceLost], None]) -> None:
        """Have `hear` told of each message and each loss when it comes, before `receive` gives it.

        It is called on a thread of the link's, and must not wait.
        """
        ...

    def take_only(self, is_wanted: Callable[[Message | DeviceLost], bool]) -> None:
        """Keep for `receive` from now on only what `is_wanted`; all else is dropped when it comes.

        So nobody fills the queue of one who has no reason to receive for long. It is called as what overhears is.
        """
        ...

    def watch(self, node: str) -> None:
        """Have the end of `node` told as a loss from now on, as if it had been talked to, and keep the connection."""
        ...

    def unwatch(self, node: str) -> None:
        """Let the connection to `node` end where nothing is said for a while: it is watched for nothing any more."""
        ...

    def measure(
        self, node: str, *, timeout_s: float, fresh_s: float = 0.0, check: Callable[[], None] = go_on
    ) -> LinkRate:
        """Measure the link to `node`, unless that was done at most `fresh_s` ago. Raises as `send` does.

        Takes a few megabytes, or, on a slow link, what passes in half a second. `check` runs meanwhile, and may raise.
        """
        ...


@dataclass(frozen=True, slots=True)
class Joined:
    """A member appeared, or said something new of itself."""

    member: Member


@dataclass(frozen=True, slots=True)
class Lost:
    """A member is no longer present; why, in words for the user."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class Unled:
    """The lease is lost: another coordinator has a later epoch, or it could not be renewed in time."""

    epoch: int


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """The list of the cluster's members is another one: somebody was let in or removed, or this device was."""


MeshEvent: TypeAlias = Joined | Lost | Unled | MembersChanged


def add_event(waiting: MutableSequence[MeshEvent], event: MeshEvent) -> None:
    """Add `event` to those that nobody has been told yet.

    Of what a member says of itself, which may take megabytes, only the latest waits, and none once it is lost.
    """
    if isinstance(event, Joined | Lost):
        node = event.member.node if isinstance(event, Joined) else event.node
        for number, earlier in enumerate(waiting):
            if isinstance(earlier, Joined) and earlier.member.node == node:
                del waiting[number]
                break
    if not (isinstance(event, MembersChanged) and event in waiting):
        waiting.append(event)


Handler: TypeAlias = (
    "Callable[[str, int, Document], Document]"  # coordinator's node, its epoch, the order -> the answer
)


class Mesh(Protocol):
    """This device's place in a mesh. Threads and sockets behind it; its methods may be called from any thread."""

    @property
    def node(self) -> str:
        """This device's id."""
        ...

    @property
    def link(self) -> Link:
        """The data link to the other members."""
        ...

    def members(self) -> tuple[Member, ...]:
        """Return who is present, this device included, in order of their ids."""
        ...

    def wait(self, *, timeout_s: float) -> tuple[MeshEvent, ...]:
        """Return what happened since the last call, waiting until something did; empty when nothing did in time."""
        ...

    def announce(self, capabilities: Document) -> None:
        """Say what this device has, or has now."""
        ...

    def report(self, load: Document, *, lasts_s: float | None = None) -> None:
        """Say how busy this device is: live rates, kept by others only as the latest.

        lasts_s: after which it is not busy any more, unless it says so again; None: until it says something else.
        """
        ...

    def lead(self, *, timeout_s: float, check: Callable[[], None] = go_on) -> int:
        """Take the lease of the coordinator, renew it from then on, and return its epoch, later than all before.

        check: runs while it waits, and may raise to stop.
        Raises MeshError when another coordinator holds it and goes on holding it.
        """
        ...

    def resign(self) -> None:
        """Give the lease back."""
        ...

    def publish_plan(self, epoch: int, plan: Document) -> None:
        """Let everybody see the plan of `epoch`; it is kept for those that join later."""
        ...

    def order(self, node: str, order: Document, *, timeout_s: float) -> Document:
        """Have `node` carry out an order under this coordinator's epoch, and return its answer.

        Raises DeviceLost when it is not there or does not answer in time, MeshError when it refuses, whose cause
        is the error that it met: of the kind that it says, with its words and figures.
        """
        ...

    def serve(self, handler: Handler) -> None:
        """Answer orders with `handler`, on a thread of its own, one at a time, never one of a past epoch."""
        ...

    def close(self) -> None:
        """Leave: say so, stop all threads, close all sockets. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """How a run uses a mesh.

    mesh: an open one, which stays open, or the address of its broker; an empty one is what this device joined with.
    folder: where this device's key and cluster are kept; None is where `edge-run mesh` keeps them.
    takes_any_numerics: devices whose kernels may compute other bits take part too.
    say: is told what the user should see.
    interrupt: of the model that is opened; it ends the opening too, which takes long where a device fetches its layers.
    """

    mesh: Mesh | str = ""
    folder: Path | str | None = None
    takes_any_numerics: bool = False
    say: Callable[[str], None] = logger.warning
    interrupt: Interrupt = field(default_factory=Interrupt)

    def __post_init__(self) -> None:
        is_open = callable(getattr(self.mesh, "members", None))
        require(
            isinstance(self.mesh, str) or is_open,
            f"mesh {self.mesh!r:.60}: must be one that is open, the address of a broker (mqtt://HOST), an empty text "
            "for the mesh that this device joined, or MeshOptions",
        )
