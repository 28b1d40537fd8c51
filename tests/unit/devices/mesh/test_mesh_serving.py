"""Where the broker of a cluster is announced: only where others reach it; and whom it lets in."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.devices.members.cluster import found_cluster
from edge_run.devices.members.keys import DeviceKey
from edge_run.devices.members.list_changes import ListEditor
from edge_run.devices.members.member_list import DAY_S
from edge_run.devices.mesh import serving as serving_module
from edge_run.devices.mesh.changes import new_invitation
from edge_run.devices.mesh.serving import access_of, serving
from waiting import until

DEVICE = DeviceKey(bytes(range(32)))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2", "[::1]", "192.0.2.1"])
def test_no_address_that_each_device_has_is_announced(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[list[str]] = []

    def announce(cluster: str, founder: bytes, addresses: list[str], port: int) -> Any:
        announced.append(addresses)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(serving_module, "EmbeddedBroker", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(serving_module, "Advertisement", announce)
    with serving(found_cluster(DEVICE, "box", "mqtt://host", f"{host}:1883"), DEVICE):
        assert announced == ([["192.0.2.1"]] if host == "192.0.2.1" else [])


def test_where_this_device_has_other_addresses_the_broker_is_announced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have booted before its network was there, and has run for weeks since."""
    done: list[tuple[str, list[str]]] = []
    own: list[str] = []

    def announce(cluster: str, founder: bytes, addresses: list[str], port: int) -> Any:
        done.append(("began", addresses))
        return SimpleNamespace(close=lambda: done.append(("ended", addresses)))

    monkeypatch.setattr(serving_module, "EmbeddedBroker", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(serving_module, "Advertisement", announce)
    monkeypatch.setattr(serving_module, "own_addresses", lambda host: [*own, "127.0.0.1"])
    monkeypatch.setattr(serving_module, "LOOK_S", 0.01)
    expected: list[tuple[str, list[str]]] = []
    with serving(found_cluster(DEVICE, "box", "mqtt://host", "0.0.0.0:1883"), DEVICE):
        for address in ("192.0.2.1", "192.0.2.2"):
            own[:] = [address]
            expected.append(("began", [address]))
            until(lambda: done == expected)
            expected.append(("ended", [address]))
    assert done == expected


def test_an_invitation_that_ended_long_ago_lets_nobody_ask() -> None:
    cluster, now_s = found_cluster(DEVICE, "box", "mqtt://host", "0.0.0.0:1883"), int(time.time())
    listed = cluster.listed
    for expires_s in (now_s + 60, now_s - 60, now_s - DAY_S - 60):
        listed = ListEditor(DEVICE, listed, cluster.secret).invite(new_invitation("use", 1, expires_s)[0], 0.0)
    users = access_of(cluster.adopt(listed, DEVICE), DEVICE).users
    assert [one.node in users for one in listed.roll.invitations] == [True, True, False]
