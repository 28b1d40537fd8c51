"""Lets other threads wake the link's thread while it waits for sockets."""

from __future__ import annotations

import contextlib
import socket


class Wakeup:
    """A pair of sockets: a byte sent into one ends the wait for the other. Any thread may call `wake`."""

    def __init__(self) -> None:
        """Raises OSError where there can be no more sockets."""
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        self._receiver.setblocking(False)

    def fileno(self) -> int:
        """Return what the link's thread waits for."""
        return self._receiver.fileno()

    def wake(self) -> None:
        """End the wait of the link's thread, the present one or the next."""
        with contextlib.suppress(OSError):  # full: the thread is awake anyway; closed: so is the link
            self._sender.send(b"\0")

    def clear(self) -> None:
        """Let the next wait begin: the thread is awake."""
        with contextlib.suppress(BlockingIOError):
            while self._receiver.recv(4096):
                pass

    def close(self) -> None:
        """Close both sockets. Idempotent."""
        self._sender.close()
        self._receiver.close()
