"""What is inside the envelopes: the bodies of control messages, made and checked."""

from __future__ import annotations

from edge_run.base.errors import ProtocolError
from edge_run.base.mesh import Document
from edge_run.devices.link_lane import Peer
from edge_run.devices.mesh_envelope import MOST_BYTES, Envelope, canonical
from edge_run.devices.mesh_events import Announced, Beat, Left

MOST_PLACES, MOST_LETTERS, KEY_LETTERS = 16, 200, 40
HERE, WATCHING, LEFT, WILL = "here", "watching", "left", "will"
LEASE_STATES = ("claim", "hold", "free")


def status_event(envelope: Envelope) -> Beat | Left | None:
    """Return what a status says of presence; None of who looks on. Raises ProtocolError."""
    state, (asks, is_rare) = envelope.body.get("state"), (envelope.body.get(word) is True for word in ("asks", "rare"))
    if state == HERE:
        return Beat(envelope.node, envelope.boot, asks, is_rare)
    if state in (LEFT, WILL):
        return Left(envelope.node, envelope.boot, is_will=state == WILL)
    if state == WATCHING:
        return None
    raise ProtocolError(f"node {envelope.node}: a status that is none", node=envelope.node)


def announced(envelope: Envelope) -> Announced:
    """Return what a node says that it has, and where its data link is. Raises ProtocolError."""
    body = envelope.body
    name, capabilities, link = body.get("name"), body.get("capabilities"), body.get("link")
    if not _is_text(name) or not isinstance(capabilities, dict) or not isinstance(link, dict) or not _is_link(link):
        raise ProtocolError(f"node {envelope.node}: an announcement that is none", node=envelope.node)
    return Announced(envelope.node, envelope.boot, str(name), capabilities, link, body.get("rare") is True)


def peer_of(node: str, boot: str, link: Document) -> Peer | None:
    """Return where the data link of a node is; None where it has none."""
    places = link.get("places")
    if not link or not isinstance(places, (list, tuple)):
        return None
    return Peer(node, boot, str(link["key"]), tuple(str(place) for place in places))


def check_document(document: Document) -> None:
    """Raise ProtocolError where `document` cannot be sent: no JSON, or too much, with room for what is around it."""
    try:
        size = len(canonical(document))
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"document: is no JSON ({error})") from error
    if size > MOST_BYTES // 2:
        raise ProtocolError(f"document: has {size} bytes, at most {MOST_BYTES // 2} may be announced")


def document_in(envelope: Envelope, name: str) -> Document:
    """Return the object `name` of a body. Raises ProtocolError."""
    value = envelope.body.get(name)
    if not isinstance(value, dict):
        raise ProtocolError(f"node {envelope.node}: a message without {name}", node=envelope.node)
    return value


def _is_link(link: Document) -> bool:
    """Whether it is where a data link is, or nothing."""
    if not link:
        return True
    key, places = link.get("key"), link.get("places")
    return (
        link.keys() == {"key", "places"}
        and isinstance(key, str)
        and len(key) == KEY_LETTERS
        and key.isascii()
        and isinstance(places, list)
        and len(places) <= MOST_PLACES
        and all(_is_text(place) and str(place).startswith("tcp://") for place in places)
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MOST_LETTERS and value.isprintable()
