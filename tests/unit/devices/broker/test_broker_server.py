"""What the broker hands to the sockets of its clients."""

from __future__ import annotations

from typing import Any

import pytest

from edge_run.devices.broker.access import BrokerAccess, BrokerUser, digest
from edge_run.devices.broker.server import Connection, MqttServer
from mqtt_client import connect_packet, publish_packet, subscribe_packet

ACCESS = BrokerAccess({"user": BrokerUser(digest("word"), ("t/#",), ("t/#",))})


class Wire:
    """A transport that notes what it is given."""

    def __init__(self) -> None:
        self.given: list[bytes] = []
        self.is_gone = False

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
