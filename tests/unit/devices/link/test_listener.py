"""The socket on which the data link listens: whose connections are cut off, by descriptors that others may have."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from edge_run.devices.link.connection import Keys
from edge_run.devices.link.frames import FrameKind, Head, pack
from edge_run.devices.link.listener import LinkListener

TIMEOUT_S = 30.0


class Listening:
    """A listener, and a member `a` that sends to it, on one thread."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self._server, self._client = Keys(*zmq.curve_keypair()), Keys(*zmq.curve_keypair())
        self.listener = LinkListener(self.context, self._server, ("127.0.0.1",), 0)

    def connect(self) -> zmq.Socket[bytes]:
        """Return a connection by which a message of `a` came."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.curve_publickey, dealer.curve_secretkey = self._client.public, self._client.secret
        dealer.curve_serverkey = self._server.public
        dealer.linger = 0
        dealer.connect(f"tcp://127.0.0.1:{self.listener.port}")
        dealer.send_multipart([pack(Head(FrameKind.DATA, 1, 0, {}))])
        self.wait(lambda: self.listener.next() is not None)
        return dealer

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Serve the listener until `is_so`."""
        until_s = time.monotonic() + TIMEOUT_S
        while not is_so():
            assert time.monotonic() < until_s
            if self.listener.guard.poll(10):
                self.listener.check_key({self._client.public: "a"})

    def descriptors(self) -> list[int]:
        return [one for one, node in self.listener._connections.items() if node == "a"]


@pytest.fixture
def listening() -> Iterator[Listening]:
    one = Listening()
    try:
        yield one
    finally:
        one.listener.close()
        one.context.destroy(0)


def test_the_connections_of_a_member_are_cut_off(listening: Listening) -> None:
    dealer = listening.connect()
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    before = len(os.listdir("/proc/self/fd"))
    listening.listener.cut("a")
    assert monitor.poll(TIMEOUT_S * 1e3), "it is shut down"
    assert len(os.listdir("/proc/self/fd")) <= before
    dealer.disable_monitor()
    monitor.close(0)
    dealer.close()


def test_a_descriptor_that_is_somebody_elses_by_now_is_left_as_it_is(listening: Listening) -> None:
    """Such as the connection to the broker, which was made anew after a member's had ended."""
    ours, theirs = socket.socketpair()  # first: they must not have the number themselves that becomes free
    dealer = listening.connect()
    (descriptor,) = listening.descriptors()
    dealer.close()
    listening.wait(lambda: not _is_open(descriptor))
    with ours, theirs, _copy_as(ours, descriptor):
        listening.listener.cut("a")
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _copy_as(one: socket.socket, descriptor: int) -> Iterator[None]:
    """Let `descriptor`, which is closed, be another one of `one` in this block."""
    os.dup2(one.fileno(), descriptor)
    try:
        yield
    finally:
        os.close(descriptor)
