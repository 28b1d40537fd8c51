"""The events that bear on who is present in a mesh, and the instructions that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from edge_run.base.fields import Document
from edge_run.base.mesh import Joined, Lost


def places_of(link: Document) -> tuple[str, ...]:
    """Return the addresses at which a data link is reached, of where it was announced to be."""
    places = link.get("places")
    return tuple(map(str, places)) if isinstance(places, (list, tuple)) else ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat.

    asks: its sender does not know everybody yet.
    is_rare: the next one comes as if nobody led.
    """

    node: str
    incarnation: str
    asks: bool = False
    is_rare: bool = False


@dataclass(frozen=True, slots=True)
class Announced:
    """A node said what it has, and where its data link is.

    is_rare: as of `Heartbeat`.
    """

    node: str
    incarnation: str
    name: str
    capabilities: Document
    link: Document
    is_rare: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """A node said that it leaves.

    is_will: its broker said so, after the connection broke.
    """

    node: str
    incarnation: str
    is_will: bool = False


@dataclass(frozen=True, slots=True)
class SentAway:
    """A node is no member any more."""

    node: str


@dataclass(frozen=True, slots=True)
class BrokerChanged:
    """The connection to the broker came, or went."""

    is_up: bool


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """The data link to a node came, or broke."""

    node: str
    is_up: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Spoke:
    """A node that was given up said something over the data link, in the incarnation that is known of it."""

    node: str


@dataclass(frozen=True, slots=True)
class Doubted:
    """An answer did not come: does this device still hear itself through the broker?"""


@dataclass(frozen=True, slots=True)
class HolderChanged:
    """A lease is held from now on, by `holder`, or no more."""

    holder: str | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went on."""


Event: TypeAlias = (
    Heartbeat | Announced | Left | SentAway | BrokerChanged | LinkChanged | Spoke | Doubted | HolderChanged | Tick
)


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """Let the user of the mesh know."""

    event: Joined | Lost


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Publish a heartbeat, as `Heartbeat` has it."""

    asks: bool
    is_rare: bool = False


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish what this device has."""


@dataclass(frozen=True, slots=True)
class Unlink:
    """Close the data link to a node: it is gone, or started anew."""

    node: str


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Connect to the broker anew: it takes what this device says, and hands nothing back."""


Instruction: TypeAlias = EmitEvent | SendHeartbeat | Announce | Unlink | Reconnect
