"""Reads and writes the packets of MQTT 3.1.1: bytes on one side, dataclasses on the other. No I/O, no state.

A packet that a client may not send, or that is malformed, raises ProtocolError. Section numbers are those of the OASIS
standard of MQTT 3.1.1. QoS 2 (exactly once) is not supported, because no part of edge-run uses it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias, TypeVar

from edge_run.base.errors import ProtocolError

LEVEL = 4  # of the protocol: MQTT 3.1.1
MOST_TEXT_BYTES = 512  # of a topic, a filter, a user, a password
MOST_FILTERS = 64
_T = TypeVar("_T")


class PacketKind(IntEnum):
    """The kind of a packet (2.2.1)."""

    CONNECT = 1
    CONNACK = 2
    PUBLISH = 3
    PUBACK = 4
    SUBSCRIBE = 8
    SUBACK = 9
    UNSUBSCRIBE = 10
    UNSUBACK = 11
    PINGREQ = 12
    PINGRESP = 13
    DISCONNECT = 14


class ConnectReturnCode(IntEnum):
    """What a broker answers to a client that connects (3.2.2.3)."""

    ACCEPTED = 0
    VERSION = 1
    CLIENT = 2
    UNAVAILABLE = 3
    PASSWORD = 4
    FORBIDDEN = 5


@dataclass(frozen=True, slots=True)
class Publish:
    """A message.

    number: of the packet, where it is confirmed.
    """

    topic: str
    payload: bytes
    is_confirmed: bool = False
    is_kept: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class Connect:
    """A client that connects.

    will: what is to be published when the connection breaks.
    keepalive_s: 0 is no limit.
    """

    client: str
    user: str
    password: bytes = field(repr=False)
    keepalive_s: int
    will: Publish | None
    level: int = LEVEL


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Topic filters to subscribe to, each with whether messages are to be confirmed."""

    number: int
    filters: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Topic filters to unsubscribe from."""

    number: int
    filters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Word:
    """A packet without content: PUBACK, PINGREQ, DISCONNECT."""

    kind: PacketKind


Packet: TypeAlias = Connect | Publish | Subscribe | Unsubscribe | Word


def read_head(data: bytes | bytearray) -> tuple[int, int, int] | None:
    """Return first byte, length of the head, and length of what follows; None while the head is not whole.

    Raises ProtocolError for a length of more than four bytes (2.2.3).
    """
    size = 0
    for index, byte in enumerate(data[1:5]):
        size |= (byte & 0x7F) << 7 * index
        if not byte & 0x80:
            return data[0], index + 2, size
    if len(data) >= 5:
        raise ProtocolError("packet: a length of more than four bytes")
    return None


def read_packet(first: int, content: bytes) -> Packet:
    """Return the packet whose first byte is `first` and which has `content` behind its head. Raises ProtocolError."""
    kind, flags = first >> 4, first & 0x0F
    if kind == PacketKind.PUBLISH:
        return _read_publish(flags, _Reader(content))
    if flags != (2 if kind in (PacketKind.SUBSCRIBE, PacketKind.UNSUBSCRIBE) else 0):
        raise ProtocolError(f"packet: of kind {kind} with flags {flags}")
    if kind == PacketKind.CONNECT:
        return _read_connect(_Reader(content))
    if kind == PacketKind.SUBSCRIBE:
        return _read_subscribe(_Reader(content))
    if kind == PacketKind.UNSUBSCRIBE:
        reader = _Reader(content)
        return Unsubscribe(reader.number(), reader.until_end(reader.text))
    if kind in (PacketKind.PINGREQ, PacketKind.DISCONNECT, PacketKind.PUBACK) and len(content) == (
        2 if kind == PacketKind.PUBACK else 0
    ):
        return Word(PacketKind(kind))
    raise ProtocolError(f"packet: of kind {kind} and {len(content)} bytes, which no client of ours sends")


def write_packet(first: int, content: bytes, more_bytes: int = 0) -> bytes:
    """Return a packet; more_bytes: of it that are to follow."""
    size, head = len(content) + more_bytes, bytearray([first])
    while True:
        size, byte = size >> 7, size & 0x7F
        head.append(byte | 0x80 if size else byte)
        if not size:
            return bytes(head) + content


def write_publish(message: Publish) -> bytes:
    """Return the packet of a message for a client up to its payload, which all who listen share."""
    topic = message.topic.encode()
    number = message.number.to_bytes(2, "big") if message.is_confirmed else b""
    first = PacketKind.PUBLISH << 4 | message.is_confirmed << 1 | message.is_kept
    return write_packet(first, struct.pack(">H", len(topic)) + topic + number, len(message.payload))


def write_answer(answer: ConnectReturnCode) -> bytes:
    """Return what is said to who connects; never of a session that was kept."""
    return write_packet(PacketKind.CONNACK << 4, bytes([0, answer]))


def write_confirmation(kind: PacketKind, number: int, content: bytes = b"") -> bytes:
    """Return a PUBACK, SUBACK or UNSUBACK of the packet `number`."""
    return write_packet(kind << 4, number.to_bytes(2, "big") + content)


PONG = write_packet(PacketKind.PINGRESP << 4, b"")


class _Reader:
    """Takes fields from a packet's content, one after the other. Raises ProtocolError where there are no more."""

    def __init__(self, content: bytes) -> None:
        self._content, self._place = content, 0

    def take(self, size: int) -> bytes:
        taken = self._content[self._place : self._place + size]
        if len(taken) < size:
            raise ProtocolError(f"packet: ends where {size} bytes were to come")
        self._place += size
        return taken

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self, least: int = 1) -> int:
        number = int.from_bytes(self.take(2), "big")
        if number < least:
            raise ProtocolError("packet: without a number")
        return number

    def data(self) -> bytes:
        return self.take(self.number(least=0))

    def text(self) -> str:
        content = self.data()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ProtocolError(f"packet: a text that is no UTF-8 ({error.reason})") from error
        if len(content) > MOST_TEXT_BYTES or "\0" in text:
            raise ProtocolError(f"packet: a text of {len(content)} bytes, or with a zero in it")
        return text

    def rest(self) -> bytes:
        return self.take(len(self._content) - self._place)

    def until_end(self, take_one: Callable[[], _T]) -> tuple[_T, ...]:
        """Return what `take_one` gives until nothing is left: at least one, and no more than a client may name."""
        found: list[_T] = []
        while self._place < len(self._content):
            found.append(take_one())
            if len(found) > MOST_FILTERS:
                raise ProtocolError(f"packet: of more than {MOST_FILTERS} filters")
        if not found:
            raise ProtocolError("packet: of no filters")
        return tuple(found)

    def check_end(self) -> None:
        if self._place != len(self._content):
            raise ProtocolError("packet: is longer than what it says")


def _read_connect(reader: _Reader) -> Connect:
    """Read a CONNECT (3.1)."""
    name, level, flags, keepalive_s = reader.data(), reader.byte(), reader.byte(), reader.number(least=0)
    if name != b"MQTT":
        raise ProtocolError("packet: of another protocol than MQTT 3.1.1 or 5")
    if level != LEVEL:  # what follows has another form
        return Connect("", "", b"", keepalive_s, None, level)
    if flags & 1 or flags >> 3 & 3 > 1 or (not flags & 4 and flags & 0x38) or (flags & 0x40 and not flags & 0x80):
        raise ProtocolError(f"packet: a connection with flags {flags:#x}")
    client, will = reader.text(), None
    if flags & 4:
        topic = reader.text()
        will = Publish(topic, reader.data(), is_confirmed=bool(flags & 8), is_kept=bool(flags & 0x20))
    user = reader.text() if flags & 0x80 else ""
    password = reader.data() if flags & 0x40 else b""
    reader.check_end()
    return Connect(client, user, password, keepalive_s, will)


def _read_publish(flags: int, reader: _Reader) -> Publish:
    """Read a PUBLISH (3.3)."""
    quality = flags >> 1 & 3
    if quality > 1:
        raise ProtocolError(f"packet: a message of quality {quality}; 0 and 1 are served")
    topic = reader.text()
    if not topic or set(topic) & set("+#"):
        raise ProtocolError("packet: a message for a topic with wildcards, or for none")
    number = reader.number() if quality else 0
    return Publish(topic, reader.rest(), bool(quality), bool(flags & 1), number)


def _read_subscribe(reader: _Reader) -> Subscribe:
    """Read a SUBSCRIBE (3.8). Who asks for quality 2 is given 1."""

    def take_one() -> tuple[str, bool]:
        text, quality = reader.text(), reader.byte()
        if quality > 2:
            raise ProtocolError(f"packet: a subscription of quality {quality}")
        return text, quality > 0

    number = reader.number()
    return Subscribe(number, reader.until_end(take_one))
