"""Where the broker of a cluster is announced: only where others reach it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.devices.members.cluster import new_cluster
from edge_run.devices.members.keys import DeviceKey
from edge_run.devices.mesh import serving as serving_module
from edge_run.devices.mesh.serving import serving


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2", "[::1]", "192.0.2.1"])
def test_no_address_that_each_device_has_is_announced(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[list[str]] = []

    def announce(cluster: Any, addresses: list[str], port: int) -> Any:
        announced.append(addresses)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(serving_module, "EmbeddedBroker", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(serving_module, "Advertisement", announce)
    with serving(new_cluster("mqtt://host", f"{host}:1883"), DeviceKey(bytes(range(32)))):
        assert announced == ([["192.0.2.1"]] if host == "192.0.2.1" else [])
