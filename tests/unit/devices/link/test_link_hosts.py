"""Places on a network: what is read as a host and a port, and what is refused."""

from __future__ import annotations

import pytest

from edge_run.base.errors import ConfigError
from edge_run.devices.link.hosts import is_loopback, parse_place, place_text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("host", ("host", 5)),
        ("host:6", ("host", 6)),
        ("::1", ("::1", 5)),
        ("[::1]:6", ("::1", 6)),
        ("[::1]", ("::1", 5)),
    ],
)
def test_a_place_has_a_host_and_a_port(text: str, wanted: tuple[str, int]) -> None:
    assert parse_place(text, 5) == wanted
    assert parse_place(place_text(*wanted), 0) == wanted


@pytest.mark.parametrize(
    "text", ["", ":5", "host:", "host:x", "host:0", "host:65536", "host:99999", "host:²", "host:" + "9" * 5000]
)
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_place(text, 5)


def test_what_every_device_calls_itself_by_is_loopback() -> None:
    assert all(map(is_loopback, ("localhost", "Localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.0.2.1", "2001:db8::1", "localhost.example", "host", "")))
