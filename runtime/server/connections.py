"""Connections that cost little: a client that sends or reads too slowly is dropped, and so is one too many.

uvicorn bounds the size of headers and how long an idle connection stays; what it does not bound is done here.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from typing import Any
from weakref import WeakSet

import anyio
import h11
from starlette.types import Message, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from edge_run.base.units import MIB
from edge_run.devices.host.memory import BESIDE_BUDGETS

HEAD_S = 20.0
BODY_S = 60.0
WRITE_S = 60.0
AHEAD_S = 5.0  # for an answer, where more than PIECE_BYTES follow its request
MOST_CONNECTIONS = 4096
MOST_UNREAD_BYTES = 256 * MIB
PIECE_BYTES = 1 << 16
# Of clients whose request is whole; h11 documents the second one, and forgets to export it.
_ASKED = h11.DONE, h11.MIGHT_SWITCH_PROTOCOL  # type: ignore[attr-defined]


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


class UnreadRoom:
    """What answers hold that their clients have not read yet.

    Where all together hold more than `most_bytes`, of the key that holds most the client is dropped that has read
    nothing for longest. What they hold is beside budgets: another model may be opened meanwhile.
    """

    def __init__(self, most_bytes: int = MOST_UNREAD_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held = dict[anyio.CancelScope, tuple[str, int]]()  # key and bytes, who read last at the end

    async def write(self, send: Send, message: Message, key: str) -> bool:
        """Send the body of an answer in pieces, each when the client has read most of those before it.

        Returns whether all was sent.
        """
        body, has_more = message["body"], message.get("more_body", False)
        BESIDE_BUDGETS.add(len(body))
        with anyio.CancelScope() as scope:
            try:
                for start in range(0, len(body), PIECE_BYTES):
                    self._held.pop(scope, None)
                    self._held[scope] = key, len(body)
                    self._make_room()
                    end = start + PIECE_BYTES
                    await send({**message, "body": body[start:end], "more_body": has_more or end < len(body)})
            finally:
                self._held.pop(scope, None)
                BESIDE_BUDGETS.add(-len(body))
        return not scope.cancelled_caught

    def _make_room(self) -> None:
        of_keys = Counter[str]()
        for key, n_bytes in self._held.values():
            of_keys[key] += n_bytes
        while of_keys.total() > self._most_bytes and len(self._held) > 1:
            ((most, _),) = of_keys.most_common(1)
            slowest = next(scope for scope, (key, _) in self._held.items() if key == most)
            of_keys[most] -= self._held.pop(slowest)[1]
            slowest.cancel()


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 whose clients have a deadline for headers, for bodies, and for reading what they are sent."""

    head_s, body_s, write_s, ahead_s = HEAD_S, BODY_S, WRITE_S, AHEAD_S

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waits_for, self._is_last = "", False
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._ahead: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection."""
        super().connection_made(transport)
        self._wait_for("head")

    def data_received(self, data: bytes) -> None:
        """Take what came; the deadline is of the whole head or body, so that a byte now and then does not move it."""
        if self._is_last:
            return
        super().data_received(data)
        if self.conn.their_state in _ASKED:  # uvicorn stops where more follows: it would not see its client leave
            if len(self.conn.trailing_data[0]) <= PIECE_BYTES:
                self.flow.resume_reading()
            elif self._ahead is None:
                self._ahead = self.loop.call_later(self.ahead_s, self._read_on)
        self._wait_for(self._due())

    def _read_on(self) -> None:
        """Have the answer at hand be the last one; what follows its request is read, and left aside."""
        self._is_last, self.cycle.keep_alive = True, False
        self.flow.resume_reading()

    def _stay(self) -> None:
        """Do not read on: the answer is complete, or its client has left."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    def on_response_complete(self) -> None:
        """Go on to the next request."""
        self._stay()
        super().on_response_complete()
        self._wait_for(self._due())

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines."""
        self._wait_for("")
        self._stay()
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

    def timeout_keep_alive_handler(self) -> None:
        """End an idle connection, whose client has a while to read what is left."""
        super().timeout_keep_alive_handler()
        self._wait_for(self._due())

    def shutdown(self) -> None:
        """End it with the server, once its client has read what is left."""
        super().shutdown()
        self._wait_for(self._due())

    def eof_received(self) -> None:
        """Close it, as its client says no more; what is left has to be read in time."""
        super().eof_received()
        self._wait_for("close")

    def send_400_response(self, msg: str) -> None:
        """Say that what came is no request, where the one before it has no answer yet."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _due(self) -> str:
        """Return what the client owes; nothing between requests, where uvicorn's own deadline counts."""
        if self.transport.is_closing():
            return "close"
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
            seconds = {"head": self.head_s, "body": self.body_s, "close": self.write_s}
            self._reading = self.loop.call_later(seconds[what], self.transport.abort)
