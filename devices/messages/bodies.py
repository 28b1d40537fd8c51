"""The bodies of control messages: made, and checked when they arrive."""

from __future__ import annotations

from edge_run.base.errors import ProtocolError
from edge_run.base.fields import Document, is_name
from edge_run.devices.link.connection import Peer
from edge_run.devices.link.places import AddressFilter, check_key, parse_link_address
from edge_run.devices.members.member_list import canonical
from edge_run.devices.messages.envelope import MOST_BYTES, Envelope
from edge_run.devices.presence.events import Announced, Heartbeat, Left, places_of

MOST_PLACES, MOST_LETTERS = 16, 200
HERE, WATCHING, LEFT, WILL = "here", "watching", "left", "will"
LEASE_STATES = ("claim", "hold", "free")


def status_event(envelope: Envelope) -> Heartbeat | Left | None:
    """Return what a status says of presence; None of who looks on. Raises ProtocolError."""
    state, (asks, is_rare) = envelope.body.get("state"), (envelope.body.get(word) is True for word in ("asks", "rare"))
    if state == HERE:
        return Heartbeat(envelope.node, envelope.incarnation, asks, is_rare)
    if state in (LEFT, WILL):
        return Left(envelope.node, envelope.incarnation, is_will=state == WILL)
    if state == WATCHING:
        return None
    raise ProtocolError("a status that is none", node=envelope.node)


def announced(envelope: Envelope, incarnation: str) -> Announced | Heartbeat:
    """Return what a node says that it has, and where its data link is. Raises ProtocolError.

    Where it does not say that it heard of our `incarnation`, it may have been said long ago, and counts as a heartbeat:
    a node that is there is asked, and says it again.
    """
    body = envelope.body
    name, capabilities, link = body.get("name"), body.get("capabilities"), body.get("link")
    heard = body.get("heard")
    if not is_name(name, MOST_LETTERS, 1) or not isinstance(capabilities, dict) or not isinstance(link, dict):
        raise ProtocolError("an announcement that is none", node=envelope.node)
    try:
        check_link(link)
    except ProtocolError as error:
        raise ProtocolError(str(error), node=envelope.node) from error
    is_rare = body.get("rare") is True
    if not isinstance(heard, (list, tuple)) or incarnation not in heard:
        return Heartbeat(envelope.node, envelope.incarnation, is_rare=is_rare)
    return Announced(envelope.node, envelope.incarnation, str(name), capabilities, link, is_rare)


def peer_of(node: str, incarnation: str, link: Document, places: AddressFilter) -> Peer | None:
    """Return where the data link of a node is, of its addresses those that may be tried; None where it has none."""
    if not link:
        return None
    key = str(link["key"])
    return Peer(node, incarnation, key, places.usable(key, places_of(link)))


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
        raise ProtocolError(f"a message without {name}", node=envelope.node)
    return value


def check_link(link: Document) -> None:
    """Raise ProtocolError where `link` is not where a data link is, nor nothing."""
    if not link:
        return
    key, places = link.get("key"), link.get("places")
    if link.keys() != {"key", "places"} or not isinstance(key, str) or not isinstance(places, (list, tuple)):
        raise ProtocolError("data link: must be announced with a key and places")
    if len(places) > MOST_PLACES:
        raise ProtocolError(f"data link: {len(places)} places, at most {MOST_PLACES} may be announced")
    check_key(key)
    for place in places:
        parse_link_address(str(place))
