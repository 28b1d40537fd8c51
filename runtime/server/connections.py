"""Connections that cost little: a client that sends or reads too slowly is dropped, and so is one too many.

uvicorn bounds the size of headers and how long an idle connection stays; what it does not bound is done here.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import threading
import time
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
MOST_EARLY = 64  # connections that are held before there is a server; others wait in the system's queue
RETRY_S = 0.1
# Of clients whose request is whole; h11 documents the second one, and forgets to export it.
_ASKED = h11.DONE, h11.MIGHT_SWITCH_PROTOCOL  # type: ignore[attr-defined]


_HEALTH = b"GET /health HTTP/1.", b"GET /v1/health HTTP/1."
_LOADING = b'{"status":"loading model"}'
_NOT_YET = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_LOADING), _LOADING)
)


class BoundedListener(socket.socket):
    """A socket that takes so many connections at most, whether they speak HTTP yet or are still at TLS's handshake.

    early: connections that were taken before there was a server, of which nothing was read.
    """

    most_connections = MOST_CONNECTIONS

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._taken = WeakSet[socket.socket]()
        self.early: list[socket.socket] = []

    def close(self) -> None:
        """Close it, and the connections that nobody took over."""
        for connection in self.early:
            connection.close()
        super().close()

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


class HealthBeforeServing:
    """Says in this block, in a thread, that the server's model is being opened, to who asks how it is.

    Who asks for something else waits, and nothing of it is read: at the end of the block those connections are the
    listener's early ones, up to MOST_EARLY. For a server without TLS.
    """

    def __init__(self, listener: BoundedListener) -> None:
        self._listener, self._selector = listener, selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="edge-run-health", daemon=True)

    def __enter__(self) -> None:
        self._until, self._end = socket.socketpair()
        self._listener.setblocking(False)
        for one in (self._until, self._listener):
            self._selector.register(one, selectors.EVENT_READ)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.close()
        self._thread.join()
        self._selector.close()
        self._until.close()

    def _run(self) -> None:
        silent, is_listening = dict[int, socket.socket](), True  # those that said nothing yet, by file descriptors
        while True:
            has_room = len(silent) + len(self._listener.early) < MOST_EARLY
            if has_room and not is_listening:
                self._selector.register(self._listener, selectors.EVENT_READ)
            elif is_listening and not has_room:
                self._selector.unregister(self._listener)
            is_listening = has_room
            ready = {key.fd for key, _ in self._selector.select()}
            if self._until.fileno() in ready:
                self._listener.early += silent.values()
                return
            for number in ready & silent.keys():
                connection = silent.pop(number)
                self._selector.unregister(connection)
                self._answer(connection)
            if self._listener.fileno() in ready:
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # who connected has left again, or this process has too many files open
                    time.sleep(RETRY_S)
                    continue
                connection.setblocking(False)
                self._selector.register(connection, selectors.EVENT_READ)
                silent[connection.fileno()] = connection

    def _answer(self, connection: socket.socket) -> None:
        """Answer what is first said on a connection, or hold it."""
        with contextlib.suppress(OSError):
            try:
                said = connection.recv(max(map(len, _HEALTH)), socket.MSG_PEEK)
            except BlockingIOError:  # it has not said anything after all
                self._listener.early.append(connection)
                return
            if said and not said.startswith(_HEALTH):
                self._listener.early.append(connection)
                return
            if said:
                connection.recv(PIECE_BYTES)
                connection.sendall(_NOT_YET)
        connection.close()


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
