"""What the broker hands to the sockets of its clients."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edge_run.devices.broker.access import MOST_OF_GUEST, BrokerAccess, BrokerUser, digest, guest_user, member_user
from edge_run.devices.broker.server import BURST_BYTES, Connection, MqttServer
from edge_run.devices.members.join_request import MOST_REQUEST_BYTES
from mqtt_client import connect_packet, publish_packet, subscribe_packet

ACCESS = BrokerAccess({"user": BrokerUser(digest("word"), ("t/#",), ("t/#",))})


class Wire:
    """A transport that notes what it is given."""

    def __init__(self) -> None:
        self.given: list[bytes] = []
        self.is_gone = False

    def close(self) -> None:
        self.is_gone = True

    abort = pause_reading = close

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1)

    def is_closing(self) -> bool:
        return self.is_gone

    def get_write_buffer_size(self) -> int:
        return 0

    def writelines(self, data: list[bytes]) -> None:
        self.given += data


@pytest.fixture
def server() -> MqttServer:
    return MqttServer(ACCESS, lambda line: None, 8)


def connected(server: MqttServer, number: int) -> tuple[Connection, Wire]:
    """Return a connection that was let in and listens."""
    connection, wire = Connection(server, number), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    say(server, connection, connect_packet(f"client-{number}", "user", "word") + subscribe_packet("t/#"))
    return connection, wire


def say(server: MqttServer, connection: Connection, data: bytes) -> None:
    server.read_buffer[: len(data)] = data
    connection.buffer_updated(len(data))


def test_nothing_empty_is_sent(server: MqttServer) -> None:
    """Since Python 3.12 `writelines` keeps it: the broker would compute without end, and end no connection."""
    connection, wire = connected(server, 1)
    say(server, connection, publish_packet("t/1", b"hello", number=5) + publish_packet("t/1", b"", is_kept=True))
    assert [one[0] >> 4 for one in wire.given if one != b"hello"] == [2, 9, 4, 3, 3]
    assert b"hello" in wire.given
    assert all(wire.given)


def test_nothing_is_sent_to_who_is_gone_though_nobody_was_told_yet(server: MqttServer) -> None:
    """Since Python 3.12 `writelines` watches a socket then that is about to be closed, and another has its number."""
    connection, wire = connected(server, 1)
    other, heard = connected(server, 2)
    wire.is_gone, n_before = True, len(wire.given)
    say(server, other, publish_packet("t/1", b"hello"))
    assert b"hello" in heard.given
    assert len(wire.given) == n_before
    assert not connection.is_closing


def let_in(server: MqttServer, number: int, packet: bytes) -> Connection:
    connection = Connection(server, number)
    connection.connection_made(Wire())  # type: ignore[arg-type]
    say(server, connection, packet)
    assert server.broker.is_in(number)
    return connection


def test_a_guest_says_no_more_than_a_request_to_come_in() -> None:
    async def check() -> None:
        server = MqttServer(BrokerAccess({"guest": guest_user("c", "word")}), lambda line: None, 8)
        guest = let_in(server, 1, connect_packet("g", "guest", "word"))
        say(server, guest, publish_packet("edge/v1/c/join/g", bytes(MOST_REQUEST_BYTES)))
        assert not guest.is_closing
        say(server, guest, publish_packet("edge/v1/c/join/g", bytes(MOST_OF_GUEST))[:8])
        assert guest.is_closing, "its head says how long it is"

    asyncio.run(check())


def test_what_a_user_may_say_does_not_begin_anew_with_each_connection() -> None:
    async def check() -> None:
        user = member_user("c", "word")
        server = MqttServer(BrokerAccess({"user": user, "other": user}), lambda line: None, 8)
        first = let_in(server, 1, connect_packet("a", "user", "word"))
        assert first.allowance.spend(2 * BURST_BYTES) > 0
        server.lose(first)
        again = Connection(server, 2)
        again.connection_made(Wire())  # type: ignore[arg-type]
        say(server, again, connect_packet("b", "user", "word"))
        assert (server.broker.is_in(2), again.is_closing) == (False, True)
        assert let_in(server, 3, connect_packet("c", "other", "word")).allowance.spend(1) == 0

    asyncio.run(check())
