"""Connections that cost little: a client that sends or reads too slowly is dropped, and so is one too many.

uvicorn bounds the size of headers and how long an idle connection stays; what it does not bound is done here.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0
BODY_S = 60.0
WRITE_S = 60.0
MOST_CONNECTIONS = 4096


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 whose clients have a deadline for headers, for bodies, and for reading what they are sent."""

    head_s, body_s, write_s, most_connections = HEAD_S, BODY_S, WRITE_S, MOST_CONNECTIONS

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waits_for = ""
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or drop it where there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            transport.abort()
        else:
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
