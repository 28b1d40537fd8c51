"""A server with too much to do, more devices than it has places for, and frames that take long: over real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run import SplitModel
from edge_run.partition.split_choice import Chooser, FrameCost
from edge_run.runtime.split import connection as split_connection
from edge_run.runtime.split import protocol
from edge_run.runtime.split.bundle import read_bundle
from edge_run.runtime.split.connection import ServerConnection
from edge_run.runtime.split.protocol import ASK_CODE, ASK_PROBE, FrameRefused, Reply, ServerLink
from split_servers import SlowServer, served
from vision_models import make_pixels
from waiting import until


class Asker:
    """Devices that ask a server for frames at the same time, each over a connection of its own."""

    def __init__(self, head: Path, port: int) -> None:
        bundle = read_bundle(head)
        latent = np.zeros((bundle.codec.channels, bundle.positions), np.float32)
        self._code, self._port = bundle.codec.encode(latent, 0), port
        self._pool = ThreadPoolExecutor(16)
        self.links: list[ServerLink] = []

    def ask(self, patience_s: float = 30.0) -> Future[Reply]:
        link = ServerLink(("127.0.0.1", self._port), 30)
        self.links.append(link)
        return self._pool.submit(link.ask, ASK_CODE, self._code, patience_s)

    def send(self) -> ServerLink:
        """Ask for a frame as a device that will not wait for it."""
        link = ServerLink(("127.0.0.1", self._port), 30)
        link._socket.sendall(protocol.REQUEST.pack(ASK_CODE, 1, 30.0, len(self._code)) + self._code)
        return link

    def queue_s(self) -> float:
        with contextlib.closing(ServerLink(("127.0.0.1", self._port), 30)) as link:
            return link.ask(ASK_PROBE, b"", 30).queue_s

    def close(self) -> None:
        for link in self.links:
            link.close()
        self._pool.shutdown()


@pytest.fixture
def slow(head: Path, monkeypatch: pytest.MonkeyPatch) -> SlowServer:
    return SlowServer(head.parent, monkeypatch)


@pytest.fixture
def port(slow: SlowServer) -> Iterator[int]:
    with slow.running() as port:
        yield port


@pytest.fixture
def asker(head: Path, port: int) -> Iterator[Asker]:
    with contextlib.closing(Asker(head, port)) as one:
        yield one


def learn(slow: SlowServer, asker: Asker, takes_s: float) -> None:
    """Have the server know how long its frames take."""
    slow.takes_s = takes_s
    for _ in range(2):
        asker.ask().result(60)
    slow.at_work.clear()
    slow.computed = 0


def test_a_device_that_asks_for_nothing_knows_the_queue(head: Path, slow: SlowServer, asker: Asker, port: int) -> None:
    """Else one that found the server busy once would compute here for ever."""
    with SplitModel(head, f"127.0.0.1:{port}", threads=1) as model:
        until(lambda: model.stats.bytes_per_s)
        before_s = model.stats.expected_s["code 0"]
        learn(slow, asker, 0.5)
        asked = [asker.ask() for _ in range(8)]
        until(lambda: asker.queue_s() > 1.0)
        until(lambda: model.stats.expected_s["code 0"] > before_s + 0.5)
        for one in asked:
            one.result(60)
        assert asker.queue_s() == 0.0
        until(lambda: model.stats.expected_s["code 0"] < before_s + 0.1)


def test_frames_of_devices_that_have_gone_are_not_computed(slow: SlowServer, asker: Asker) -> None:
    learn(slow, asker, 1.0)
    first = asker.ask()
    assert slow.at_work.wait(60)
    going = [asker.send() for _ in range(4)]
    until(lambda: asker.queue_s() > 3.0)
    for link in going:
        link.close()
    assert asker.queue_s() <= 1.0
    last = asker.ask()
    assert first.result(60).queue_s < 1.0, "less than a frame takes"
    assert last.result(60).queue_s < 3.0, "less than the first and two of the others"
    assert slow.computed == 2


def test_a_frame_that_would_be_late_is_refused_at_once(slow: SlowServer, asker: Asker) -> None:
    learn(slow, asker, 1.0)
    first = asker.ask()
    assert slow.at_work.wait(60)
    with pytest.raises(FrameRefused, match=r"server: refuses: busy: .* of other frames come first, and .* s are left"):
        asker.ask(patience_s=1.5).result(60)
    assert not first.done()
    first.result(60)
    assert slow.computed == 1


def test_a_server_that_is_never_in_time_is_asked_less_and_less_often(head: Path, slow: SlowServer, port: int) -> None:
    """Though the device can connect to it again at once, each time."""
    slow.takes_s = 0.6
    pixels = make_pixels(1)[0]
    with SplitModel(head, f"127.0.0.1:{port}", mode="code 0", threads=1, deadline_s=0.2) as model:
        for _ in range(40):
            until(lambda: model.stats.has_server)
            assert model.run(pixels).report.mode == "local"
        assert 2 <= model.stats.server_losses + model.stats.refused <= 6
        slow.takes_s = 0.0
        until(lambda: model.stats.has_server and model.run(pixels).report.mode == "code 0")


def test_a_large_answer_does_not_make_the_link_slow(head: Path, slow: SlowServer, port: int) -> None:
    slow.answer = [np.zeros((1, 1 << 19), np.float32)]
    with SplitModel(head, f"127.0.0.1:{port}", mode="code 0", threads=1, deadline_s=30) as model:
        until(lambda: model.stats.bytes_per_s)
        for _ in range(6):
            assert model.run(make_pixels(1)[0]).report.mode == "code 0"
        # A frame that the machine holds up makes it slow too, until others have come.
        until(lambda: model.run(make_pixels(1)[0]).report.mode == "code 0" and model.stats.bytes_per_s > 5e6)


class Device(ServerConnection):
    """The connection of a device, which counts how often it had one and lost it."""

    def __init__(self, fingerprint: str, port: int) -> None:
        self.losses = 0
        super().__init__(("127.0.0.1", port), fingerprint, Chooser((), {}), threading.Lock())
        self.start(30.0)

    @property
    def is_connected(self) -> bool:
        return self._frames is not None

    def lose(self, reason: str, *, was_asked: bool = False) -> None:
        self.losses += self.is_connected
        super().lose(reason, was_asked=was_asked)


def test_more_devices_than_there_are_places_for_do_not_send_each_other_away(head: Path) -> None:
    """Sixteen connections from an address, of which each device takes two."""
    fingerprint = read_bundle(head).codec.fingerprint.hex()
    with contextlib.ExitStack() as stack, served(head.parent) as (_, port):
        devices = list[Device]()
        for _ in range(8):
            devices.append(stack.enter_context(contextlib.closing(Device(fingerprint, port))))
            until(lambda: devices[-1].is_connected)
        late = stack.enter_context(contextlib.closing(Device(fingerprint, port)))
        end_s = time.monotonic() + 8  # than which no device is silent for longer, nor for so long
        while time.monotonic() < end_s:
            until(lambda: late.problem != "not connected yet")
            assert late.problem == (
                f"127.0.0.1:{port}: lets nobody in now: it has 16 connections from this address, its most, and a "
                "device takes two"
            )
            time.sleep(0.1)
        assert [one.losses for one in devices] == [0] * 8
        devices[0].close()
        until(lambda: late.is_connected)


class StubbornServer:
    """Answers a frame after `takes_s`, and no probe meanwhile: as over a link that the frame fills."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s, self._is_free = takes_s, threading.Event()
        self._is_free.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                device, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(device,)))
                self._threads[-1].start()

    def _serve(self, device: socket.socket) -> None:
        costs = {"code": FrameCost(0.001, 30), "image": FrameCost(0.001, 30)}
        with device, contextlib.suppress(OSError):
            self._is_free.wait(60)
            device.sendall(protocol.make_hello({"00": costs}))
            while True:
                head = device.recv(protocol.REQUEST.size, socket.MSG_WAITALL)
                if not head:
                    return
                kind, number, _, length = protocol.REQUEST.unpack(head)
                if length:
                    device.recv(length, socket.MSG_WAITALL)
                if kind != ASK_PROBE:
                    self._is_free.clear()
                    time.sleep(self.takes_s)
                    self._is_free.set()
                self._is_free.wait(60)
                device.sendall(protocol.REPLY.pack(protocol.DONE, number, 0.0, 0.0, 0))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(60)


def test_a_frame_that_fills_the_link_is_not_lost_to_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that a probe was under way before."""
    for name in ("PROBE_LIMIT_S", "CONNECT_LIMIT_S"):
        monkeypatch.setattr(split_connection, name, 1.0)  # which a probe may take on a busy machine
    monkeypatch.setattr(split_connection, "FRAMES_TELL_S", 0.0)
    monkeypatch.setattr(split_connection, "PROBE_EVERY_S", 0.01)
    with contextlib.closing(StubbornServer(3.0)) as server, contextlib.closing(Device("00", server.port)) as device:
        until(lambda: device.is_connected)
        for _ in range(3):
            reply: Any = device.ask(ASK_CODE, b"code", 30.0)
            assert reply.body == b""
            time.sleep(0.2)
        assert device.losses == 0
