"""The data link's thread among peers that lie, and where files run out: one bad peer costs that peer only."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from edge_run.base.errors import DeviceLost, NotTrusted
from edge_run.devices.link.connection import OPEN_S, Peer
from edge_run.devices.link.data_link import DataLink
from program import next_line

WAIT_S = 30.0


def peer(node: str, link: DataLink) -> Peer:
    return Peer(node, "1", link.key, (f"tcp://127.0.0.1:{link.port}",))


@contextlib.contextmanager
def pair(*others: Peer) -> Iterator[tuple[DataLink, DataLink]]:
    with contextlib.closing(DataLink()) as a, contextlib.closing(DataLink()) as b:
        a.set_peers({"b": peer("b", b), **{one.node: one for one in others}})
        b.set_peers({"a": peer("a", a)})
        yield a, b


def assert_works(a: DataLink, b: DataLink) -> None:
    a.send("b", {"still": "here"}, timeout_s=WAIT_S)
    message = b.receive(timeout_s=WAIT_S)
    assert message is not None
    assert message.header == {"still": "here"}


@pytest.mark.parametrize("key", [" " * 40, "~" * 40, "short"])
def test_a_key_that_is_none_costs_its_peer_only(key: str) -> None:
    with pair(Peer("bad", "1", key, ("tcp://127.0.0.1:9", "tcp://nowhere"))) as (a, b):
        for _ in range(2):
            with pytest.raises(DeviceLost):
                a.measure("bad", timeout_s=1)
            with pytest.raises(DeviceLost):
                a.send("bad", {}, timeout_s=1)
        assert_works(a, b)


@pytest.mark.parametrize("echo", [b"junk", b"", b"EL\x02\x04" + bytes(17) + b"[]", b"EL\x02\x09" + bytes(17) + b"{}"])
def test_an_echo_that_is_none_costs_its_peer_only(echo: bytes) -> None:
    public, secret = zmq.curve_keypair()
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as liar:
        liar.setsockopt(zmq.LINGER, 0)
        liar.setsockopt(zmq.CURVE_SERVER, 1)
        liar.setsockopt(zmq.CURVE_SECRETKEY, secret)
        port = liar.bind_to_random_port("tcp://127.0.0.1")
        liar.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1e3))

        def answer() -> None:
            with contextlib.suppress(zmq.Again):  # who did not ask in time has lost it all the same
                liar.send_multipart([liar.recv_multipart()[0], echo])

        thread = threading.Thread(target=answer)
        thread.start()
        with pair(Peer("liar", "1", public.decode(), (f"tcp://127.0.0.1:{port}",))) as (a, b):
            with pytest.raises(DeviceLost):
                a.send("liar", {}, timeout_s=WAIT_S)
            assert_works(a, b)
        thread.join()
    context.destroy(0)


def test_who_shows_anothers_key_takes_nothing_from_him() -> None:
    with contextlib.closing(DataLink()) as a, contextlib.closing(DataLink()) as b:
        thief = Peer("thief", "1", a.key, ("tcp://127.0.0.1:9999",))
        b.set_peers({"a": peer("a", a)})
        b.set_peers({"thief": thief, "a": peer("a", a)})
        a.set_peers({"b": peer("b", b)})
        a.send("b", {}, timeout_s=WAIT_S)
        message = b.receive(timeout_s=WAIT_S)
        assert message is not None
        assert message.node == "a"
        with pytest.raises(NotTrusted):
            b.send("thief", {}, timeout_s=1)


@pytest.mark.parametrize("n_left", [0, 1, 2, 3])
def test_where_no_files_are_left_a_connection_is_opened_later(n_left: int) -> None:
    with pair() as (a, b):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + n_left, hard))
            with pytest.raises(DeviceLost, match="too many files are open"):
                a.measure("b", timeout_s=2)
            later = threading.Timer(0.5, resource.setrlimit, (resource.RLIMIT_NOFILE, (soft, hard)))
            later.start()
            a.send("b", {"late": 1}, timeout_s=WAIT_S)
            later.join()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        message = b.receive(timeout_s=WAIT_S)
        assert message is not None
        assert message.header == {"late": 1}
        assert_works(a, b)


VICTIM = """
import resource, sys, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (96, 4096))
from edge_run.devices.link.data_link import DataLink
from edge_run.devices.link.connection import Peer
from edge_run.base.errors import DeviceLost
link = DataLink()
print(link.key, link.port, flush=True)
key, port = sys.stdin.readline().rstrip("\\n").rsplit(" ", 1)
link.set_peers({"a": Peer("a", "1", key, (f"tcp://127.0.0.1:{port}",))})
def measure():
    while True:
        time.sleep(0.05)
        try:
            link.measure("a", timeout_s=1)
        except DeviceLost:
            pass
threading.Thread(target=measure, daemon=True).start()
while True:
    try:
        message = link.receive(timeout_s=1)
        if message is not None:
            link.send("a", message.header, timeout_s=10)
    except DeviceLost:
        pass
"""


def test_more_connections_than_files_pass_by() -> None:
    """A stranger opens 400 connections to a device that may have 96 files open, and lets them go."""
    victim = subprocess.Popen([sys.executable, "-c", VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert victim.stdin is not None
    assert victim.stdout is not None
    with victim, contextlib.closing(DataLink()) as a:
        try:
            key, port = next_line(victim).rstrip("\n").rsplit(" ", 1)
            victim.stdin.write(f"{a.key} {a.port}\n")
            victim.stdin.flush()
            a.set_peers({"b": Peer("b", "1", key, (f"tcp://127.0.0.1:{port}",))})
            a.send("b", {"n": 0}, timeout_s=WAIT_S)
            assert a.receive(timeout_s=WAIT_S) is not None
            with contextlib.ExitStack() as stack:
                for _ in range(400):
                    with contextlib.suppress(OSError):
                        stack.enter_context(socket.create_connection(("127.0.0.1", int(port)), 0.2))
                time.sleep(0.5)
                a.drop("b", "its connection is opened anew, while no files are left there")
            end_s = time.monotonic() + 60
            answer = None
            while answer is None and time.monotonic() < end_s:
                with contextlib.suppress(DeviceLost):
                    a.send("b", {"n": 1}, timeout_s=5)
                    answer = a.receive(timeout_s=2)
            assert answer is not None, "it takes part again"
        finally:
            victim.kill()


def test_measuring_takes_as_long_whatever_is_at_an_address() -> None:
    """Where nothing listens, and where something does that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as mute, contextlib.closing(DataLink()) as a:
        key = zmq.curve_keypair()[0].decode()
        ports = {"open": mute.getsockname()[1], "shut": 1}
        a.set_peers({n: Peer(n, "1", key[:-1] + n[0], (f"tcp://127.0.0.1:{port}",)) for n, port in ports.items()})
        took_s: dict[str, float] = {}

        def measure(node: str) -> None:
            started_s = time.monotonic()
            with contextlib.suppress(DeviceLost):
                a.measure(node, timeout_s=OPEN_S + 1)
            took_s[node] = time.monotonic() - started_s

        threads = [threading.Thread(target=measure, args=(node,)) for node in ports]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(one_s > 0.9 * OPEN_S for one_s in took_s.values()), "none is known sooner"
