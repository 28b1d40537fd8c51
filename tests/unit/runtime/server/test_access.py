"""Who may ask: each row of the table of attacks that concerns hosts, origins and keys."""

from __future__ import annotations

import pytest

from edge_run.base.errors import ConfigError
from edge_run.runtime.server.access import Access, access_for, read_keys
from edge_run.runtime.server.refusals import Refusal

KEY = "a-long-secret"
LOCAL = access_for("127.0.0.1", "127.0.0.1")
KEYED = access_for("0.0.0.0", "0.0.0.0", ["models.example"], ["https://chat.example"], [KEY, "another-key"])
BEARER = {"authorization": f"Bearer {KEY}"}


def status(
    access: Access, path: str = "/v1/models", method: str = "GET", version: str = "1.1", **headers: str | None
) -> int:
    """Return what is said to a request with these headers; one that is None is left out."""
    named = {name.replace("_", "-"): value for name, value in {"host": "localhost:8080", **headers}.items()}
    given = {name: value for name, value in named.items() if value is not None}
    try:
        access.check(method, path, given, http_version=version)
    except Refusal as refusal:
        return refusal.status
    return 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:8080", "[::1]:8080", "[::1]"])
def test_names_of_this_machine(host: str) -> None:
    assert status(LOCAL, host=host) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "192.168.1.7:8080", "", "[::2]:80", "a:b:c"]
)
def test_a_name_that_was_pointed_here_is_refused(host: str) -> None:
    """DNS rebinding: the browser says the attacker's name."""
    assert status(LOCAL, host=host) == 403
    assert status(LOCAL, "/health", host=host) == 403


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_a_program_that_speaks_http_1_0_may_leave_out_the_host_and_a_page_may_not(path: str) -> None:
    def asked(access: Access, path: str = path, **headers: str) -> int:
        return status(access, path, version="1.0", host=None, **headers)

    assert asked(LOCAL) == 200
    assert asked(KEYED, **BEARER) == 200
    assert asked(KEYED, "/v1/models") == 401
    for sign in ({"origin": "http://localhost:8080"}, {"origin": ""}, {"sec_fetch_site": "same-origin"}):
        assert asked(LOCAL, **sign) == 403
    assert asked(KEYED, origin="https://chat.example", **BEARER) == 403
    assert status(LOCAL, path, version="1.0", host="") == 403
    assert status(LOCAL, path, host=None) == 403


def test_beyond_loopback_addresses_are_known_and_names_are_not() -> None:
    assert status(KEYED, host="192.168.1.7:8080", **BEARER) == 200
    assert status(KEYED, host="models.example", **BEARER) == 200
    assert status(KEYED, host="evil.example", **BEARER) == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:8081"},
        {"origin": "https://localhost:8080"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/health", "/"])
def test_pages_of_other_sites_are_refused(headers: dict[str, str], path: str) -> None:
    assert status(LOCAL, path, "POST", **headers) == 403
    assert status(KEYED, path, "POST", **headers, **BEARER) == 403


def test_own_pages_and_programs_may_ask() -> None:
    assert status(LOCAL, origin="http://localhost:8080", sec_fetch_site="same-origin") == 200
    assert status(LOCAL, sec_fetch_site="none") == 200


def test_an_allowed_site_may_ask_also_before_it_has_a_key() -> None:
    site = {"origin": "https://chat.example", "sec_fetch_site": "cross-site"}
    assert status(KEYED, **site) == 401
    assert status(KEYED, **site, **BEARER) == 200
    assert status(KEYED, method="OPTIONS", **site) == 200
    assert status(KEYED, method="OPTIONS") == 401


@pytest.mark.parametrize(
    "path", ["/v1/models", "/page/", "/metrics", "/api/tags", "/props", "/nowhere", "/health/", "//health"]
)
def test_without_a_key_nothing_is_open_but_health(path: str) -> None:
    assert status(KEYED, path) == 401
    assert status(KEYED, path, **BEARER) == 200
    assert status(KEYED, "/health") == 200


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({"authorization": "bearer another-key"}, 200),
        ({"x_api_key": KEY}, 200),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": KEY}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": f"Bearer {KEY[:-1]}"}, 401),
        ({"authorization": f"Bearer {KEY}x"}, 401),
        ({"x_api_key": "\udcff"}, 401),
    ],
)
def test_keys(headers: dict[str, str], wanted: int) -> None:
    assert status(KEYED, **headers) == wanted


def test_keys_are_compared_in_constant_time_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one fits: how long it takes says nothing of which."""
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    assert KEYED.has_key(BEARER)
    assert not KEYED.has_key({"x-api-key": "short"})
    assert compared == [(32, 32)] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("0.0.0.0", "0.0.0.0"), "--host 0.0.0.0: others reach"),
        (("::", "::"), "--host ::: others reach"),
        (("box", "192.168.1.7"), "--host box: others reach"),
        (("localhost", "127.0.0.1", (), ("*",)), r"--allow-origin \*"),
        (("localhost", "127.0.0.1", (), ("chat.example",)), "--allow-origin chat.example: must be"),
        (("localhost", "127.0.0.1", (), ("https://chat.example/",)), "must be as a browser says it"),
        (("localhost", "127.0.0.1", ("http://name",)), "--allow-host"),
        (("localhost", "127.0.0.1", ("name:80",)), "--allow-host name:80"),
    ],
)
def test_a_server_that_everybody_could_ask_does_not_start(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        access_for(*arguments)  # type: ignore[arg-type]


def test_key_files() -> None:
    assert read_keys("# of Anna\nanna-s-key\n\n  # of the editor\n  of-the-editor  \n", "file") == [
        "anna-s-key",
        "of-the-editor",
    ]
    for text, message in (
        ("# none\n", "has no key"),
        ("short\n", "5 letters"),
        ("two words of it\n", "without spaces"),
        ("schlüssel-der-tür\n", "ASCII"),
        ("x" * 600, "600 letters"),
        ("long-enough\n" * 1001, "1001 keys"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_keys(text, "file")
