"""What a service manager is told, at a real socket."""

from __future__ import annotations

import secrets
import socket
import sys
import time
from pathlib import Path

import pytest

from edge_run.devices.host.service_manager import ServiceManager


@pytest.mark.parametrize("is_abstract", [False, True])
def test_states(tmp_path: Path, is_abstract: bool) -> None:
    if is_abstract and sys.platform != "linux":
        pytest.skip("abstract names are Linux's")
    address = f"@edge-run-{secrets.token_hex(8)}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(address.replace("@", "\0"))
        manager = ServiceManager(address)
        before = time.monotonic_ns() // 1000
        manager.ready("serving caf\udce9\nat home")
        manager.reloading()
        manager.stopping()
        assert heard.recv(4096) == "READY=1\nSTATUS=serving caf\ufffd at home".encode()
        reloading, since = heard.recv(4096).decode().split("\n")
        assert reloading == "RELOADING=1"
        assert before <= int(since.removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000
        assert heard.recv(4096) == b"STOPPING=1"


@pytest.mark.parametrize("address", [None, "", "/nowhere/at/all"])
def test_without_a_manager_nothing_happens(address: str | None) -> None:
    manager = ServiceManager(address)
    manager.ready("x")
    manager.stopping()
