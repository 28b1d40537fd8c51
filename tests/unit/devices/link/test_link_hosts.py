"""Places on a network: what is read as a host and a port, and what is refused."""

from __future__ import annotations

import pytest

from edge_run.base.errors import ConfigError
from edge_run.devices.link.hosts import parse_place, place_text


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
