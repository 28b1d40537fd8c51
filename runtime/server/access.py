"""Who may ask: hosts, origins and keys, checked before anything of a request is read. Decisions only, no I/O.

A page of another site that the user's browser shows can send requests here, and with a name that it has pointed at this
machine (DNS rebinding) even read the answers. So a request needs a Host that this server is known by (or none, in
HTTP/1.0, which no browser speaks) and no sign that another site sent it, whatever address the server has; and beyond
loopback a key.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_run.base.errors import ConfigError
from edge_run.base.files.key_files import key_lines
from edge_run.runtime.server.page_files import PAGE, PAGE_FILES
from edge_run.runtime.server.refusals import Refusal

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
ANY_ORIGIN = "*"
OPEN_PATHS = frozenset({"/health", "/v1/health", *PAGE_FILES})
WHOSE = "edge_run.key"  # of an ASGI scope
_HARMLESS_SITES = ("", "none", "same-origin")
MOST_KEYS, LEAST_KEY_LETTERS, MOST_KEY_LETTERS = 1000, 8, 512


@dataclass(frozen=True, slots=True)
class Access:
    """What a request must have.

    hosts: names and addresses that its Host may say, in lower case and without port.
    takes_addresses: its Host may be any IP address: names can be pointed here by anybody, addresses cannot.
    origins: of pages of other sites that may ask, `*` for all.
    keys: digests of keys; without any, no key is asked for.
    open_paths: what needs no key.
    """

    hosts: frozenset[str]
    takes_addresses: bool = False
    origins: frozenset[str] = frozenset()
    keys: tuple[bytes, ...] = ()
    open_paths: frozenset[str] = OPEN_PATHS

    def check(
        self, method: str, path: str, headers: Mapping[str, str], scheme: str = "http", http_version: str = "1.1"
    ) -> None:
        """Raise Refusal, 403 or 401, where a request must not go on. headers: by name in lower case."""
        host, is_of_a_page = headers.get("host", "").lower(), "origin" in headers or "sec-fetch-site" in headers
        may_have_no_host = http_version == "1.0" and "host" not in headers and not is_of_a_page
        if not (may_have_no_host or self._knows(_name(host))):
            raise Refusal(
                403, "this Host is not one of the server's; start it with --allow-host to add it", code="host"
            )
        origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "").lower()
        if origin and origin.lower() == f"{scheme}://{host}":
            origin = ""
        is_allowed = self.allows(origin)
        if (origin or site not in _HARMLESS_SITES) and not (is_allowed or _follows_link(method, path, headers)):
            raise Refusal(
                403, "pages of other sites must not ask; start it with --allow-origin to let one", code="origin"
            )
        if method == "OPTIONS" and is_allowed:
            return  # a browser asks whether it may ask: without the key, which it would send later
        if path not in self.open_paths and not self.has_key(headers):
            raise Refusal(401, "needs a key: Authorization: Bearer KEY", code="invalid_api_key")

    def allows(self, origin: str) -> bool:
        """Return whether a page of the site `origin` may ask."""
        return bool(origin) and (origin.lower() in self.origins or ANY_ORIGIN in self.origins)

    def has_key(self, headers: Mapping[str, str]) -> bool:
        """Return whether a key is there, or none is needed; what it takes to find out says nothing of the keys."""
        if not self.keys:
            return True
        found = digest(given_key(headers))
        return sum(hmac.compare_digest(found, known) for known in self.keys) > 0

    def _knows(self, name: str) -> bool:
        return name in self.hosts or (self.takes_addresses and _is_address(name))


def access_for(
    host: str,
    address: str,
    allow_hosts: Sequence[str] = (),
    allow_origins: Sequence[str] = (),
    keys: Sequence[str] = (),
) -> Access:
    """Return who may ask a server that listens at `host`, which has the IP address `address`.

    Raises ConfigError where that would be everybody.
    """
    is_local = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    if not is_local and not keys:
        raise ConfigError(f"--host {host}: others reach this address, so give a file with a key (--api-key-file)")
    if ANY_ORIGIN in allow_origins and not keys:
        raise ConfigError("--allow-origin *: any page may ask then, so give a file with a key (--api-key-file)")
    for origin in allow_origins:
        if origin != ANY_ORIGIN and ("://" not in origin or origin.endswith("/") or origin.count("/") > 2):
            raise ConfigError(f"--allow-origin {origin}: must be as a browser says it, https://example.org")
    for name in allow_hosts:
        if not name or "/" in name or _name(name.lower()) != name.lower():
            raise ConfigError(f"--allow-host {name}: must be a name or an address, without scheme and port")
    return Access(
        hosts=frozenset({*LOCAL_HOSTS, *(name.lower() for name in (host, address, *allow_hosts))}),
        takes_addresses=not is_local,
        origins=frozenset(origin.lower() for origin in allow_origins),
        keys=tuple(map(digest, keys)),
    )


def read_keys(text: str, where: str) -> list[str]:
    """Return the keys in the text of a key file (`key_lines`). Raises ConfigError."""
    keys = key_lines(text)
    if not keys:
        raise ConfigError(f"{where}: has no key; write one, of {LEAST_KEY_LETTERS} letters or more, on a line")
    if len(keys) > MOST_KEYS:
        raise ConfigError(f"{where}: {len(keys)} keys, {MOST_KEYS} are the most", found=len(keys), needed=MOST_KEYS)
    for number, key in enumerate(keys, 1):
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError(f"{where}: key {number} must be letters, digits and signs of ASCII, without spaces")
        if not LEAST_KEY_LETTERS <= len(key) <= MOST_KEY_LETTERS:
            raise ConfigError(
                f"{where}: key {number} has {len(key)} letters, must have {LEAST_KEY_LETTERS} to {MOST_KEY_LETTERS}"
            )
    return keys


def given_key(headers: Mapping[str, str]) -> str:
    """Return the key of a request; empty for none."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def digest(key: str) -> bytes:
    """Return what a key is compared by: of equal length for all, so that comparing takes the same time."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _follows_link(method: str, path: str, headers: Mapping[str, str]) -> bool:
    """Return whether the user comes here from a page of another site, which sees nothing of what is answered."""
    return (method, path) == ("GET", PAGE) and (
        (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """Return a Host without its port, and an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def whose(scope: Mapping[str, Any]) -> str:
    """Return what tells apart the keys of requests, given their ASGI scope; of all the same where there are no keys."""
    return str(scope.get(WHOSE, ""))
