"""The thread that keeps the connection to the broker, without one."""

from __future__ import annotations

import threading
import time

from edge_run.base.errors import MeshError
from edge_run.devices.mesh_channel import Channel, Wiring
from edge_run.devices.mesh_cluster import Broker
from edge_run.devices.mesh_state import Outgoing


def nowhere() -> Broker:
    raise MeshError("no broker here")


def no_will() -> Outgoing:
    raise AssertionError("nobody connects")


def test_it_ends_at_once_also_when_it_is_hurried_meanwhile() -> None:
    for _ in range(40):
        channel = Channel("x", (), Wiring(nowhere, no_will, lambda *_: None, lambda *_: None, lambda: 60.0))
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
