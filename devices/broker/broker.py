"""The decisions of the broker, without I/O: who may connect, who receives which message, and which messages are kept.

Packets of numbered connections go in and instructions come out; `server.py` carries the instructions out. The broker
speaks MQTT 3.1.1 with QoS 0 and 1. Subscriptions, kept messages and the connections of a user are bounded. No session
outlives its connection, so the broker has no queue for clients that are away.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from edge_run.devices.broker.access import BrokerAccess, BrokerUser, covers, is_filter
from edge_run.devices.broker.kept import KeptMessages
from edge_run.devices.broker.packets import (
    LEVEL,
    MOST_FILTERS,
    PONG,
    Connect,
    ConnectReturnCode,
    Packet,
    PacketKind,
    Publish,
    Subscribe,
    Unsubscribe,
    Word,
    write_answer,
    write_confirmation,
    write_publish,
)

REFUSED_FILTER = 0x80
MOST_ROUTES = 512
_CLIENT = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


@dataclass(frozen=True, slots=True)
class Send:
    """Hand `data` to a connection, and `payload` after it, which other instructions may have too."""

    connection: int
    data: bytes
    payload: bytes = b""

    @property
    def size_bytes(self) -> int:
        """Of both."""
        return len(self.data) + len(self.payload)


@dataclass(frozen=True, slots=True)
class Close:
    """End a connection, after what was sent before; `why` is for the log, empty where nobody is to blame."""

    connection: int
    why: str = ""


Instruction: TypeAlias = Send | Close


@dataclass(slots=True)
class _Client:
    """The client of a connection that was let in."""

    connection: int
    name: str
    user: str
    will: Publish | None
    filters: dict[str, bool] = field(default_factory=dict)
    number: int = 0

    def next_number(self) -> int:
        self.number = self.number % 0xFFFF + 1
        return self.number


class MqttBroker:
    """The clients of a broker, what they listen to, and what is kept. Not thread-safe."""

    def __init__(self, access: BrokerAccess) -> None:
        self._access = access
        self._clients: dict[int, _Client] = {}
        self._names: dict[str, _Client] = {}
        self._routes: dict[str, tuple[tuple[_Client, bool], ...]] = {}
        self.kept = KeptMessages()
        self.refused: Counter[str] = Counter()  # messages and filters, by user

    def is_in(self, connection: int) -> bool:
        """Whether a connection was let in."""
        return connection in self._clients

    def user_of(self, connection: int) -> tuple[str, BrokerUser] | None:
        """Return as whom a connection was let in; None where it was not."""
        client = self._clients.get(connection)
        return (client.user, self._access.users[client.user]) if client is not None else None

    def set_access(self, access: BrokerAccess) -> list[Close]:
        """Let in whom `access` names, from now on; who is in and may not be any more is sent away at once."""
        before, self._access = self._access, access
        for name in before.users.keys() - access.users.keys():
            self.kept.drop_user(name)
        done: list[Close] = []
        for client in list(self._clients.values()):
            user, old = access.users.get(client.user), before.users[client.user]
            if user is None or user.password_sha256 != old.password_sha256 or not self._fits(client, user):
                client.will = None  # who is sent away says nothing more
                self._forget(client)
                done.append(Close(client.connection, f"user {client.user}: its access was changed"))
        return done

    def take(self, connection: int, packet: Packet) -> list[Instruction]:
        """Take in a packet of a connection."""
        client = self._clients.get(connection)
        if client is None:
            if isinstance(packet, Connect):
                return self._let_in(connection, packet)
            return [Close(connection, "spoke before it said who it is")]
        if isinstance(packet, Publish):
            return self._publish(client, packet)
        if isinstance(packet, Subscribe):
            return self._subscribe(client, packet)
        if isinstance(packet, Unsubscribe):
            for one in packet.filters:
                client.filters.pop(one, None)
            self._routes.clear()
            return [Send(connection, write_confirmation(PacketKind.UNSUBACK, packet.number))]
        if isinstance(packet, Word):
            return self._obey(client, packet)
        return [Close(connection, "said twice who it is")]

    def leave(self, connection: int) -> list[Instruction]:
        """A connection ended: publish its will, unless it said goodbye."""
        client = self._clients.get(connection)
        if client is None:
            return []
        self._forget(client)
        will = client.will
        return self._spread(client, will) if will is not None else []

    def _let_in(self, connection: int, packet: Connect) -> list[Instruction]:
        user = self._access.users.get(packet.user)
        name = packet.client or f"auto-{secrets.token_hex(8)}"
        refusal = self._why_not(packet, user, name)
        if refusal is not None:
            answer, why = refusal
            return [Send(connection, write_answer(answer)), Close(connection, why)]
        done: list[Instruction] = []
        other = self._names.get(name)
        if other is not None:  # the same user's, whose connection may be dead without anybody having noticed
            done += [*self.leave(other.connection), Close(other.connection)]
        client = self._clients[connection] = self._names[name] = _Client(connection, name, packet.user, packet.will)
        self._routes.clear()
        return [*done, Send(client.connection, write_answer(ConnectReturnCode.ACCEPTED))]

    def _why_not(self, packet: Connect, user: BrokerUser | None, name: str) -> tuple[ConnectReturnCode, str] | None:
        if packet.level != LEVEL:
            return ConnectReturnCode.VERSION, f"speaks version {packet.level} of the protocol, MQTT 3.1.1 is needed"
        if user is None or not user.has_password(packet.password):
            return (
                ConnectReturnCode.FORBIDDEN,
                "has no password" if not packet.password else "has a wrong user or password",
            )
        if not _CLIENT.fullmatch(name):
            return ConnectReturnCode.CLIENT, f"user {packet.user}: may not connect under this client's id"
        if name != packet.user and name in self._access.users:
            return ConnectReturnCode.CLIENT, f"user {packet.user}: may not connect under another user's name"
        other = self._names.get(name)
        if other is not None and other.user != packet.user:
            return ConnectReturnCode.CLIENT, f"user {packet.user}: may not connect as another user's client"
        will = packet.will
        if will and (len(will.payload) > user.most_bytes or not user.may_publish(will.topic, name)):
            return ConnectReturnCode.FORBIDDEN, f"user {packet.user}: may not have such a will"
        if other is None and self._connections_of(packet.user) >= user.connections:
            return ConnectReturnCode.UNAVAILABLE, f"user {packet.user}: has {user.connections} connections already"
        return None

    def _connections_of(self, user: str) -> int:
        return sum(client.user == user for client in self._clients.values())

    def _fits(self, client: _Client, user: BrokerUser) -> bool:
        """Whether `client` could be let in as it is now."""
        return all(user.may_subscribe(one, client.name) for one in client.filters)

    def _publish(self, client: _Client, message: Publish) -> list[Instruction]:
        done: list[Instruction] = []
        if message.is_confirmed:  # also where it is refused: MQTT 3.1.1 knows no other answer (3.3.5.2)
            done.append(Send(client.connection, write_confirmation(PacketKind.PUBACK, message.number)))
        return done + self._spread(client, message)

    def _spread(self, client: _Client, message: Publish) -> list[Instruction]:
        """Hand a message to who listens, and keep it where that was asked."""
        if not self._access.users[client.user].may_publish(message.topic, client.name):
            self.refused[client.user] += 1
            return []
        if message.is_kept:
            self.kept.put(client.user, message)
        plain = write_publish(Publish(message.topic, message.payload))
        return [
            Send(
                one.connection,
                write_publish(Publish(message.topic, message.payload, True, False, one.next_number()))
                if is_confirmed and message.is_confirmed
                else plain,
                message.payload,
            )
            for one, is_confirmed in self._route(message.topic)
        ]

    def _route(self, topic: str) -> tuple[tuple[_Client, bool], ...]:
        """Return who listens to `topic`, and whether with confirmation."""
        found = self._routes.get(topic)
        if found is None:
            if len(self._routes) >= MOST_ROUTES:
                self._routes.clear()
            heard = ((one, [c for f, c in one.filters.items() if covers(f, topic)]) for one in self._clients.values())
            found = self._routes[topic] = tuple((one, any(confirmed)) for one, confirmed in heard if confirmed)
        return found

    def _subscribe(self, client: _Client, packet: Subscribe) -> list[Instruction]:
        user, codes, kept = self._access.users[client.user], bytearray(), list[Instruction]()
        for text, is_confirmed in packet.filters:
            is_known = text in client.filters
            if not is_filter(text) or not user.may_subscribe(text, client.name):
                self.refused[client.user] += 1
                codes.append(REFUSED_FILTER)
            elif not is_known and len(client.filters) >= MOST_FILTERS:
                codes.append(REFUSED_FILTER)
            else:
                client.filters[text] = is_confirmed
                codes.append(int(is_confirmed))
                kept += [
                    Send(client.connection, write_publish(Publish(one.topic, one.payload, is_kept=True)), one.payload)
                    for one in self.kept.matching(text)
                ]
        self._routes.clear()
        return [Send(client.connection, write_confirmation(PacketKind.SUBACK, packet.number, bytes(codes))), *kept]

    def _obey(self, client: _Client, word: Word) -> list[Instruction]:
        if word.kind is PacketKind.PINGREQ:
            return [Send(client.connection, PONG)]
        if word.kind is PacketKind.DISCONNECT:
            client.will = None
            self._forget(client)
            return [Close(client.connection)]
        return []  # a message that was confirmed: nothing is sent again within a connection

    def _forget(self, client: _Client) -> None:
        self._clients.pop(client.connection, None)
        self._names.pop(client.name, None)
        self._routes.clear()

    def check(self) -> None:
        """Assert what always holds; tests call it after every event."""
        assert self._clients == {one.connection: one for one in self._names.values()}, "each client has one name"
        for client in self._clients.values():
            user = self._access.users[client.user]
            assert self._fits(client, user), "who is in may be in"
            assert len(client.filters) <= MOST_FILTERS
