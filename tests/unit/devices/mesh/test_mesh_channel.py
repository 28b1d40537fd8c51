"""The thread that keeps the connection to the broker, without one, and with what is none for long."""

from __future__ import annotations

import socket
import threading
import time

from edge_run.base.errors import MeshError
from edge_run.devices.members.cluster import Broker
from edge_run.devices.mesh.channel import Channel, ChannelCallbacks
from edge_run.devices.messages.outgoing import Outgoing
from edge_run.devices.messages.topics import Topic


def nowhere() -> Broker:
    raise MeshError("no broker here")


def no_will() -> Outgoing:
    raise AssertionError("nobody connects")


def test_it_ends_at_once_also_when_it_is_hurried_meanwhile() -> None:
    for _ in range(40):
        channel = Channel("x", (), ChannelCallbacks(nowhere, no_will, lambda *_: None, lambda *_: None, lambda: 60.0))
        channel.start()
        is_over = threading.Event()

        def hurry(channel: Channel = channel, is_over: threading.Event = is_over) -> None:
            while not is_over.is_set():
                channel.hurry()

        other = threading.Thread(target=hurry)
        other.start()
        try:
            started = time.monotonic()
            channel.close()
            assert time.monotonic() - started < 5
        finally:
            is_over.set()
            other.join()


CONNECTED = b"\x20\x02\x00\x00"


def test_a_broker_that_ends_while_it_is_subscribed_to_is_left_at_once() -> None:
    """It had restarted twice within a moment: the second time it was waited for until the time for a word was over."""
    changes: list[tuple[bool, str]] = []
    will = Outgoing(Topic("c", "status", "n"), b"will")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        broker = Broker("127.0.0.1", listener.getsockname()[1])
        wiring = ChannelCallbacks(
            lambda: broker, lambda: will, lambda *_: None, lambda *change: changes.append(change), lambda: 60.0
        )
        channel = Channel("x", ("edge/v1/#",), wiring)
        channel.start()
        try:
            for _ in range(2):  # it comes again within its first waits
                with listener.accept()[0] as connection:
                    connection.settimeout(5)
                    assert connection.recv(4096)[0] == 0x10, "it connects"
                    connection.sendall(CONNECTED)
                    assert connection.recv(4096)[0] == 0x82, "it subscribes"
        finally:
            channel.close()
    assert changes
    assert not any(is_up for is_up, _ in changes)
    assert "ended the connection; it is starting anew, or its access list forbids" in changes[0][1]
