"""Connections that cost little: a client that sends or reads too slowly is dropped, and so is one too many.

uvicorn bounds the size of headers and how long an idle connection stays; what it does not bound is done here.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from weakref import WeakSet

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0
BODY_S = 60.0
WRITE_S = 60.0
MOST_CONNECTIONS = 4096


class BoundedListener(socket.socket):
    """A socket that takes so many connections at most, whether they speak HTTP yet or are still at TLS's handshake."""

    most_connections = MOST_CONNECTIONS

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._taken = WeakSet[socket.socket]()

    def accept(self) -> tuple[socket.socket, Any]:
        """Take a connection. Raises ConnectionAbortedError, which asyncio takes for none, where it is one too many."""
        connection, address = super().accept()
        if len(self._taken) >= self.most_connections:
            self._taken = WeakSet(taken for taken in self._taken if taken.fileno() >= 0)
        if len(self._taken) >= self.most_connections:
            connection.close()
            raise ConnectionAbortedError("there are too many connections")
        self._taken.add(connection)
        return connection, address


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 whose clients have a deadline for headers, for bodies, and for reading what they are sent."""

    head_s, body_s, write_s = HEAD_S, BODY_S, WRITE_S

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waits_for = ""
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection."""
        super().connection_made(transport)
        self._wait_for("head")

    def data_received(self, data: bytes) -> None:
        """Take what came; the deadline is of the whole head or body, so that a byte now and then does not move it."""
        super().data_received(data)
        self._wait_for(self._due())

    def on_response_complete(self) -> None:
        """Go on to the next request."""
        super().on_response_complete()
        self._wait_for(self._due())

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines."""
        self._wait_for("")
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _due(self) -> str:
        """Return what the client owes; nothing between requests, where uvicorn's own deadline counts."""
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            return "body"
        return "head" if state is h11.IDLE and self.conn.trailing_data[0] else ""

    def _wait_for(self, what: str) -> None:
        if what == self._waits_for:
            return
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self._waits_for = what
        if what:
            seconds = self.head_s if what == "head" else self.body_s
            self._reading = self.loop.call_later(seconds, self.transport.abort)
