"""The thread that keeps the connection to the broker, without one, and with what is none for long."""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import socket
import threading
import time
from typing import Any

import pytest

from edge_run.base.errors import MeshError
from edge_run.devices.members.cluster import Broker, parse_broker
from edge_run.devices.mesh.channel import END_S, Channel, ChannelCallbacks, explain
from edge_run.devices.messages.outgoing import Outgoing
from edge_run.devices.messages.topics import Topic


def nowhere() -> Broker:
    raise MeshError("no broker here")


def no_will() -> Outgoing:
    raise AssertionError("nobody connects")


def wiring(**callbacks: Any) -> ChannelCallbacks:
    """Return callbacks that do nothing, but those that are given."""
    nothing: dict[str, Any] = {name: lambda *_: None for name in ("on_message", "on_change", "on_end")}
    return ChannelCallbacks(**{"find": nowhere, "make_will": no_will, "on_tick": lambda: 60.0, **nothing, **callbacks})


def test_it_says_when_it_ends_by_a_mistake() -> None:
    ended: queue.Queue[str] = queue.Queue()

    def fail() -> float:
        raise RuntimeError("on purpose")

    channel = Channel("x", (), wiring(on_tick=fail, on_end=ended.put))
    channel.start()
    assert "RuntimeError('on purpose')" in ended.get(timeout=60)
    channel.close()
    assert ended.empty(), "once"


def test_it_tries_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker may be away for days; waits are doubled a few times only, as no number has room for a thousand times."""
    for name in ("FIRST_WAIT_S", "LONGEST_WAIT_S"):
        monkeypatch.setattr(f"edge_run.devices.mesh.channel.{name}", 1e-9)
    ended: queue.Queue[str] = queue.Queue()
    tries = queue.Queue[bool]()
    channel = Channel("x", (), wiring(on_change=lambda is_up, _: tries.put(is_up), on_end=ended.put))
    channel.start()
    for _ in range(1100):
        assert not tries.get(timeout=60)
    assert ended.empty()
    channel.close()


def test_without_a_loop_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with no file left to open, of which a loop takes three: nobody is to wait for it."""

    def refuse() -> asyncio.AbstractEventLoop:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(asyncio.events, "new_event_loop", refuse)
    channel, failures = Channel("x", (), wiring()), list[MeshError]()

    def start() -> None:
        try:
            channel.start()
        except MeshError as error:
            failures.append(error)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert "Too many open files" in str(failures[0])
    assert "ulimit -n" in str(failures[0])
    channel.close()


LONGEST_S = 0.95 * END_S  # of closing, whose thread ends


def test_it_ends_at_once_also_when_it_is_hurried_meanwhile() -> None:
    for _ in range(40):
        channel = Channel("x", (), wiring())
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
            assert time.monotonic() - started < LONGEST_S, "it waits for its thread no longer than that"
        finally:
            is_over.set()
            other.join()


CONNECTED = b"\x20\x02\x00\x00"


def test_a_broker_that_ends_while_it_is_subscribed_to_is_left_at_once() -> None:
    """It had restarted twice within a moment: the second time it was waited for until the time for a word was over."""
    changes: list[tuple[bool, str]] = []
    will = Outgoing(Topic("c", "status", "n"), b"will")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        broker = Broker("127.0.0.1", listener.getsockname()[1])
        told = wiring(find=lambda: broker, make_will=lambda: will, on_change=lambda *change: changes.append(change))
        channel = Channel("x", ("edge/v1/#",), told)
        channel.start()
        try:
            for _ in range(2):  # it comes again within its first waits
                with listener.accept()[0] as connection:
                    connection.settimeout(30)
                    assert connection.recv(4096)[0] == 0x10, "it connects"
                    connection.sendall(CONNECTED)
                    assert connection.recv(4096)[0] == 0x82, "it subscribes"
        finally:
            channel.close()
    assert changes
    assert not any(is_up for is_up, _ in changes)
    assert "ended the connection; it is starting anew, or its access list forbids" in changes[0][1]


def test_a_name_that_can_be_none_is_told_in_one_line() -> None:
    broker = parse_broker("mqtt://192.168.1..5")
    with pytest.raises(UnicodeError) as error:
        socket.getaddrinfo(broker.host, broker.port)
    assert "the name is unknown" in explain(error.value, broker)
    assert explain(error.value, parse_broker("mqtts://me:secret@[::1]")).startswith("broker [::1]:8883: ")


def test_while_nothing_answers_it_is_said_what_that_may_be() -> None:
    """Who waits for a connection waits no longer than one attempt takes, and had no address and no advice."""
    will = Outgoing(Topic("c", "status", "n"), b"will")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        broker = Broker("127.0.0.1", silent.getsockname()[1])
        channel = Channel("x", (), wiring(find=lambda: broker, make_will=lambda: will))
        channel.start()
        try:
            with silent.accept()[0]:
                assert channel.why_down == explain(TimeoutError(), broker)
                assert f"a firewall may block port {broker.port}" in channel.why_down
        finally:
            channel.close()


def test_an_address_that_can_be_none_does_not_end_it() -> None:
    will = Outgoing(Topic("c", "status", "n"), b"will")
    changes: queue.Queue[tuple[bool, str]] = queue.Queue()
    ended: queue.Queue[str] = queue.Queue()
    told = wiring(
        find=lambda: Broker("127.0.0.1", 0),
        make_will=lambda: will,
        on_change=lambda *change: changes.put(change),
        on_end=ended.put,
    )
    channel = Channel("x", (), told)
    channel.start()
    try:
        assert changes.get(timeout=60)[1].startswith("broker 127.0.0.1:0: ")
        assert ended.empty()
    finally:
        channel.close()
