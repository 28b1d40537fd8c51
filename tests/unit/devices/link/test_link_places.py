"""What members may announce of their data links: keys, and addresses."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

import pytest
import zmq
from zmq.utils import z85

from edge_run.base.errors import ProtocolError
from edge_run.devices.link import places as link_places
from edge_run.devices.link.places import AddressFilter, Mark, check_key, is_own, may_try, parse_link_address
from edge_run.devices.mesh import checkup

FIELD = 2**255 - 19


def test_keys_that_zeromq_makes_are_good() -> None:
    for _ in range(200):
        check_key(zmq.curve_keypair()[0].decode())


@pytest.mark.parametrize("key", [" " * 40, "", "a" * 39, "~" * 40, "#" * 40, "ä" * 40, "a" * 41])
def test_a_key_that_is_none(key: str) -> None:
    with pytest.raises(ProtocolError, match="key of a data link"):
        check_key(key)


@pytest.mark.parametrize("number", [0, 1, FIELD - 1, FIELD, FIELD + 1, 1 << 255, (1 << 255) + 1])
def test_a_weak_key(number: int) -> None:
    with pytest.raises(ProtocolError, match="weak"):
        check_key(z85.encode(number.to_bytes(32, "little")).decode())


@pytest.mark.parametrize(
    "place",
    [
        "tcp://0.0.0.0:5000",
        "tcp://[::]:5000",
        "tcp://255.255.255.255:5000",
        "tcp://224.0.0.251:5353",
        "tcp://[ff02::1]:5000",
        "tcp://169.254.169.254:8080",
        "tcp://[::ffff:127.0.0.1]:5000",
        "tcp://192.168.1.1:22",
        "tcp://192.168.1.1:0",
        "tcp://192.168.1.1:65536",
        "tcp://192.168.1.1",
        "tcp://router.local:5000",
        "tcp://*:5000",
        "tcp://eth0:5000",
        "tcp://192.168.1.1;10.0.0.1:5000",
        "tcp://127.1:5000",
        "ipc:///tmp/x",
        "inproc://zeromq.zap.01",
        "",
    ],
)
def test_a_place_that_is_none(place: str) -> None:
    with pytest.raises(ProtocolError, match="address of a data link"):
        parse_link_address(place)
    assert not may_try("k", place)


def test_an_address_of_this_machine_is_tried_where_the_link_is_marked_only() -> None:
    places = ("tcp://127.0.0.1:5001", "tcp://[::1]:5001", "tcp://127.8.8.8:5001", "tcp://192.0.2.1:5001")
    assert AddressFilter().usable("k", places) == ("tcp://192.0.2.1:5001",)
    with contextlib.closing(Mark("k", 5001)):
        assert AddressFilter().usable("k", places) == places
        assert AddressFilter().usable("other", places) == places[3:]
        assert not may_try("k", "tcp://127.0.0.1:5002")
    assert not may_try("k", places[0])


def test_addresses_of_network_cards_are_this_machine_s_too() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("192.0.2.1", 9))
        own = one.getsockname()[0]
    assert is_own(parse_link_address(f"tcp://{own}:5000")[0])
    assert not may_try("k", f"tcp://{own}:5000")


def test_what_could_not_be_found_out_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    places = AddressFilter()

    def fail(key: str, port: int) -> bool:
        raise OSError("no files")

    with contextlib.closing(Mark("k", 5003)):
        with monkeypatch.context() as patch:
            patch.setattr(link_places, "is_marked", fail)
            assert not places.usable("k", ["tcp://127.0.0.1:5003"])
        assert places.usable("k", ["tcp://127.0.0.1:5003"])


def test_a_checkup_says_why_an_address_could_not_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(key: str, place: str) -> bool:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(checkup, "may_try", fail)
    found = checkup._try("k", "tcp://10.0.0.1:5000")
    assert isinstance(found, str)
    assert "Too many open files" in found
