"""The access rights at the embedded broker: users, the digests of their passwords, and the topics that each may use.

This module does no I/O. The parent process sends the rights to the broker's process as a JSON document. Topic filters
are MQTT's: `+` is one level, a last `#` is the rest. `%c` in a filter is the client's id, as in mosquitto's patterns;
`%n` is so too where that id is one that a node can have, and else no client's.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from edge_run.base.errors import ProtocolError
from edge_run.devices.messages.topics import ROOT

HOME = "home"
OF_MEMBER, GUESTS = 32, 16
MOST_PACKET, MOST_OF_GUEST = 300_000, 2 << 10  # who asks to come in says 1 KiB at most
_DIGEST_LETTERS = 64
_NODE = re.compile("[a-z2-7]{16}")


@dataclass(frozen=True, slots=True)
class BrokerUser:
    """One user of the broker.

    password_sha256: in hexadecimal digits.
    publish: filters of the topics under which it may publish.
    subscribe: filters of the topics to which it may subscribe.
    connections: at a time, at most.
    most_bytes: of a packet, and of a message that is its will.
    """

    password_sha256: str = field(repr=False)
    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    connections: int = 4
    most_bytes: int = MOST_PACKET

    def __post_init__(self) -> None:
        texts = (self.password_sha256, *self.publish, *self.subscribe)
        if not all(isinstance(text, str) for text in texts) or len(self.password_sha256) != _DIGEST_LETTERS:
            raise ProtocolError("broker access: a user without a digest of 64 digits, or with filters that are no text")
        if any(type(number) is not int or number < 1 for number in (self.connections, self.most_bytes)):
            raise ProtocolError(
                f"broker access: {self.connections!r} connections, {self.most_bytes!r} bytes; must be at least 1 each"
            )

    def has_password(self, password: bytes) -> bool:
        """Whether `password` is this user's."""
        return hmac.compare_digest(hashlib.sha256(password).hexdigest(), self.password_sha256)

    def may_publish(self, topic: str, client: str) -> bool:
        """Whether the client `client` of this user may publish to `topic`."""
        return any(covers(one, topic, client) for one in self.publish)

    def may_subscribe(self, filter_: str, client: str) -> bool:
        """Whether all that `filter_` matches may be heard by the client `client` of this user."""
        return any(covers(one, filter_, client) for one in self.subscribe)


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """All users of the broker, by name."""

    users: Mapping[str, BrokerUser] = field(default_factory=dict)

    def widened(self, other: BrokerAccess) -> BrokerAccess:
        """Return the access of all users of this one, and of those that `other` alone has."""
        return BrokerAccess({**other.users, **self.users})

    def document(self) -> dict[str, Any]:
        """Return it as what `parse_access` reads."""
        return {"users": {name: asdict(user) for name, user in self.users.items()}}


def parse_access(document: Any) -> BrokerAccess:
    """Return the access that `document` is of. Raises ProtocolError."""
    try:
        users = {str(name): _parse_user(dict(user)) for name, user in document["users"].items()}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ProtocolError(f"broker access: is not of the form that this edge-run knows ({error})") from error
    return BrokerAccess(users)


def digest(password: str) -> str:
    """Return what is kept of `password`."""
    return hashlib.sha256(password.encode()).hexdigest()


def member_user(cluster: str, password: str, *, leads: bool = True) -> BrokerUser:
    """Return what a member of `cluster` may do; each program on its device is a connection.

    leads: whether its role lets it run models on others.
    """
    return BrokerUser(digest(password), member_topics(cluster, leads=leads), (f"{ROOT}/{cluster}/#",), OF_MEMBER)


def guest_user(cluster: str, password: str) -> BrokerUser:
    """Return what whoever has an invitation may do: ask to come in, and hear who is a member."""
    asks, hears = (f"{ROOT}/{cluster}/join/%c",), (f"{ROOT}/{cluster}/members",)
    return BrokerUser(digest(password), asks, hears, GUESTS, MOST_OF_GUEST)


def home_user(cluster: str, password: str) -> BrokerUser:
    """Return what Home Assistant may do."""
    return BrokerUser(digest(password), ("homeassistant/status",), ("homeassistant/#", f"{ROOT}/{cluster}/home/+"))


def member_topics(cluster: str, *, leads: bool = True) -> tuple[str, ...]:
    """Return the topics to which a member of `cluster` publishes, as the client that its node is. leads: as above."""
    base = f"{ROOT}/{cluster}"
    leaders = (f"{base}/coord/lease", f"{base}/plan/+", f"{base}/node/+/cmd") if leads else ()
    own = tuple(f"{base}/node/%c/{kind}" for kind in ("status", "caps", "load", "rsp"))
    return (
        *leaders,
        f"{base}/members",
        f"{base}/join/%c",  # whoever comes in once more
        *own,
        f"{base}/home/%n",
        "homeassistant/binary_sensor/%n/present/config",
        "homeassistant/sensor/%n/+/config",
    )


def is_plan(topic: str) -> bool:
    """Return whether a topic is that of a plan, to which those publish who lead."""
    return covers(f"{ROOT}/+/plan/+", topic)


def mosquitto_acl(cluster: str, user: str | None) -> str:
    """Return an access list for mosquitto: what members of `cluster` may do, who share `user`; None: who names nobody.

    A client's id is its node, so that nobody speaks for another.
    """
    topics = [one.replace("%n", "%c") for one in member_topics(cluster)]
    lines = [
        f"# mosquitto: what members of the edge-run cluster {cluster} may do; its configuration names this as acl_file",
        *([f"user {user}"] if user else []),
        f"topic read {ROOT}/{cluster}/#",
        *(f"topic write {topic}" for topic in topics if "%c" not in topic),
        "",
        *(f"pattern write {topic}" for topic in topics if "%c" in topic),
    ]
    return "\n".join(lines) + "\n"


def covers(filter_: str, other: str, client: str = "") -> bool:
    """Whether every topic that `other` matches, a filter or a topic, is matched by `filter_` for `client`.

    A wildcard at the beginning matches no topic that begins with `$`, as MQTT 3.1.1 has it (4.7.2).
    """
    own = [client if level in ("%c", "%n") else level for level in filter_.split("/")]
    others = other.split("/")
    if "%n" in filter_ and not _NODE.fullmatch(client):
        return False
    if other.startswith("$") and own[0] in ("+", "#"):
        return False
    for index, level in enumerate(own):
        if level == "#":
            return index == len(own) - 1
        if index == len(others):
            return False
        if others[index] == "#" or level not in ("+", others[index]):
            return False
    return len(own) == len(others)


def is_filter(text: str) -> bool:
    """Whether `text` is a filter: wildcards stand for whole levels, and `#` comes last."""
    levels = text.split("/")
    alone = all(not set("+#") & set(level) or len(level) == 1 for level in levels)
    return bool(text) and "\0" not in text and alone and "#" not in levels[:-1]


def _parse_user(fields: dict[str, Any]) -> BrokerUser:
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return BrokerUser(**given)
