"""Where something listens, as people write it: a host, and a port where it is not the usual one."""

from __future__ import annotations

import re
from ipaddress import ip_address

from edge_run.base.errors import ConfigError

_PORT = re.compile(r":[0-9]{1,9}$")


def parse_place(text: str, default_port: int) -> tuple[str, int]:
    """Return host and port of HOST[:PORT]; an IPv6 address with a port stands in brackets. Raises ConfigError."""
    has_port = _PORT.search(text) and not _is_address(text)
    host, _, port = text.rpartition(":") if has_port else (text, "", "")
    host = host.strip("[]")
    if not host or (port and not 0 < int(port) < 65536) or (":" in host and not _is_address(host)):
        raise ConfigError(f"{text}: must be HOST or HOST:PORT")
    return host, int(port) if port else default_port


def place_text(host: str, port: int) -> str:
    """Return HOST:PORT, as `parse_place` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether a host is this device, by a name or an address that says so on every device."""
    return host.lower() == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
