"""What the service manager that started this process (systemd) is told: when it is ready, reloads, and stops.

The protocol is that of sd_notify(3): a datagram of `NAME=value` lines to the socket that the environment names.
"""

from __future__ import annotations

import contextlib
import socket
import time

from edge_run.base.files.texts import as_text

READY, RELOADING, STOPPING = "READY=1", "RELOADING=1", "STOPPING=1"
WAIT_S = 1.0  # for a manager that does not read: it is told nothing then


class ServiceManager:
    """Tells a service manager what this process does; nobody where there is none. Any thread may use it."""

    def __init__(self, address: str | None) -> None:
        """Take the address that the manager gave: a path, or `@` and an abstract name; None or empty: there is none."""
        self._address = "\0" + address[1:] if address and address.startswith("@") else address

    def ready(self, status: str) -> None:
        """Say that requests are taken, also after a reload. status: a line for people."""
        self._tell(READY, f"STATUS={' '.join(status.split())}")

    def reloading(self) -> None:
        """Say that settings are read anew, until `ready`."""
        self._tell(RELOADING, f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Say that this process is about to end."""
        self._tell(STOPPING)

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as telling:
            telling.settimeout(WAIT_S)
            telling.sendto(as_text("\n".join(lines)).encode(), self._address)
