"""The sockets of the broker, with asyncio: splits the bytes into packets, and carries out what `MqttBroker` decides.

This module bounds everything that a client can make grow: the number of connections, also by address and before a
client has named itself; the size of a packet, which is checked before the packet is read; the bytes that wait to be
sent; and the rate of all connections of a user together, by their bytes and by the time that they take here. A client
that has not named itself may send a few kilobytes for a few seconds.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

from edge_run.base.errors import ProtocolError
from edge_run.devices.broker.access import BrokerAccess
from edge_run.devices.broker.broker import Instruction, MqttBroker, Send
from edge_run.devices.broker.packets import Connect, Packet, PacketKind, read_head, read_packet

MOST_FIRST_PACKET = 16 << 10
MOST_CONNECTIONS, MOST_OF_ADDRESS = 256, 144
MOST_UNKNOWN, MOST_UNKNOWN_OF_ADDRESS, UNKNOWN_S = 64, 16, 5.0
MOST_TO_SEND, MOST_TO_SEND_IN_ALL = 6 << 20, 24 << 20
MOST_TAKEN_IN_ALL = 16 << 20
BYTES_PER_S, BURST_BYTES, PACKET_COST, SECOND_COST = 1 << 20, 4 << 20, 512, 8 << 20
TURN_S = 0.01
LEAST_REST_S = 0.05
ACCEPTED_AT_ONCE, MOST_WAITING = 8, 128
LONGEST_KEEPALIVE_S, GOODBYE_S, TELL_S = 300, 2.0, 10.0
MOST_TOLD, MOST_LETTERS, _READ_BYTES = 8, 200, 64 << 10


class Allowance:
    """How much may be said, by one connection or by all of a user: it grows with time, up to a bound."""

    def __init__(self) -> None:
        self._left, self._filled_s = float(BURST_BYTES), time.monotonic()

    def spend(self, cost: float) -> float:
        """Take `cost` from it; return for how many seconds whoever spent that rests, for a burst's time at most."""
        self._left, self._filled_s = max(-BURST_BYTES, self._left_at(now_s := time.monotonic()) - cost), now_s
        return max(LEAST_REST_S, -self._left / BYTES_PER_S) if self._left < 0 else 0.0

    @property
    def is_spent(self) -> bool:
        """Whether nothing may be said now."""
        return self._left_at(time.monotonic()) < 0

    def _left_at(self, now_s: float) -> float:
        return min(BURST_BYTES, self._left + (now_s - self._filled_s) * BYTES_PER_S)


class Connection(asyncio.BufferedProtocol):
    """One connection: its bytes until a packet is whole, and how fast it may go on.

    allowance: which the connections of its user share once it was let in.
    """

    def __init__(self, server: MqttServer, number: int) -> None:
        self._server, self.number = server, number
        self.address, self.data = "", bytearray()
        self.since_s = self.heard_s = time.monotonic()
        self.silence_s = UNKNOWN_S
        self.allowance = Allowance()
        self.is_closing = self._is_paused = False
        self.transport: asyncio.Transport  # from `connection_made` on

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = cast(asyncio.Transport, transport)
        self.address = str((transport.get_extra_info("peername") or ("unknown",))[0])
        self._server.admit(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to read to: one place for all, since what was read is taken from it at once."""
        return self._server.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take in what was read."""
        if not self.is_closing:
            self.data += self._server.read_buffer[:nbytes]
            self.work()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self.is_closing = True
        self._server.lose(self)

    def work(self) -> None:
        """Carry out the packets that are whole, as fast as this connection may speak, and let others have a turn."""
        began_s = before_s = time.thread_time()
        try:
            while not self.is_closing and (packet := self._next()) is not None:
                first, content = packet
                taken = read_packet(first, content)
                self.heard_s = time.monotonic()
                if isinstance(taken, Connect):
                    longest_s = min(taken.keepalive_s or LONGEST_KEEPALIVE_S, LONGEST_KEEPALIVE_S)
                    self.silence_s = max(UNKNOWN_S, 1.5 * longest_s)
                cost = PACKET_COST + len(content) + self._server.take(self, taken)
                now_s = time.thread_time()
                rest_s = self.allowance.spend(cost + SECOND_COST * (now_s - before_s))
                before_s = now_s
                if rest_s or now_s - began_s >= TURN_S:
                    self._rest(rest_s)
                    return
        except ProtocolError as error:
            self.close(str(error))

    def send(self, *data: bytes) -> None:
        """Hand over `data`; a connection that takes nothing is ended.

        Since Python 3.12 asyncio sends what is empty again and again, and waits for connections that are gone.
        """
        if self.is_closing or self.transport.is_closing():
            return
        self.transport.writelines([one for one in data if one])
        waiting = self.transport.get_write_buffer_size()
        if waiting > MOST_TO_SEND or (waiting > MOST_TO_SEND // 64 and self._server.has_too_much_to_send(self)):
            self.abort("does not take what is sent to it")

    def close(self, why: str = "") -> None:
        """End it after what was sent before; `why` is for the log."""
        if not self.is_closing:
            self._server.note(self.address, why)
            self.is_closing, self.data = True, bytearray()
            self.transport.close()
            asyncio.get_running_loop().call_later(GOODBYE_S, self.transport.abort)

    def abort(self, why: str = "") -> None:
        """End it at once."""
        if not self.is_closing:
            self._server.note(self.address, why)
            self.is_closing, self.data = True, bytearray()
            self.transport.abort()

    def _next(self) -> tuple[int, bytes] | None:
        """Return the first byte and the content of the next packet, None until it is whole. Raises ProtocolError."""
        if self._is_paused:
            return None
        head = read_head(self.data)
        user = self._server.broker.user_of(self.number)
        if self.data and user is None and self.data[0] >> 4 != PacketKind.CONNECT:
            raise ProtocolError("spoke before it said who it is")
        if head is None:
            return None
        first, start, size = head
        most = user[1].most_bytes if user else MOST_FIRST_PACKET
        if size > most:
            raise ProtocolError(f"packet: of {size} bytes, at most {most} are taken")
        if len(self.data) < start + size:
            if self._server.has_taken_too_much():
                raise ProtocolError("packet: too much is on its way from all together")
            return None
        content = bytes(self.data[start : start + size])
        del self.data[: start + size]
        return first, content

    def _rest(self, rest_s: float) -> None:
        """Read nothing more until this connection may speak again."""
        self._is_paused = True
        self.transport.pause_reading()
        asyncio.get_running_loop().call_later(rest_s, self._go_on)

    def _go_on(self) -> None:
        self._is_paused = False
        if not self.is_closing:
            self.heard_s = time.monotonic()
            self.work()
            if not self._is_paused and not self.is_closing:
                self.transport.resume_reading()


class MqttServer:
    """Listens, and keeps the connections within their bounds. Used on one event loop."""

    def __init__(self, access: BrokerAccess, tell: Callable[[str], None], most_connections: int) -> None:
        """`tell` is given lines for the log, a few in ten seconds at most."""
        self.broker = MqttBroker(access)
        self.read_buffer = memoryview(bytearray(_READ_BYTES))
        self._tell, self._most = tell, min(most_connections, MOST_CONNECTIONS)
        self._connections: dict[int, Connection] = {}  # in the order in which they came
        self._allowances: dict[str, Allowance] = {}  # of users, which outlive their connections
        self._number = 0
        self._dropped: Counter[tuple[str, str]] = Counter()
        self._mistakes: Counter[str] = Counter()
        self._told_s = time.monotonic() - TELL_S

    async def serve(self, host: str, port: int, on_ready: Callable[[], None]) -> None:
        """Listen until cancelled. Raises OSError where it cannot."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._make, host, port, backlog=ACCEPTED_AT_ONCE)
        for listening in server.sockets:  # that was how many are accepted before others are read; more may wait
            with socket.fromfd(listening.fileno(), listening.family, listening.type) as same:
                same.listen(MOST_WAITING)
        on_ready()
        try:
            while True:
                await asyncio.sleep(1.0)
                self._sweep()
        finally:
            server.close()
            for one in list(self._connections.values()):
                one.abort()

    def set_access(self, access: BrokerAccess) -> None:
        """Let in whom `access` names, from now on; who may not be in any more is cut off."""
        self._allowances = {user: one for user, one in self._allowances.items() if user in access.users}
        for one in self.broker.set_access(access):
            connection = self._connections.get(one.connection)
            if connection is not None:
                connection.abort(one.why)

    def admit(self, connection: Connection) -> None:
        """Note a new connection, and make room for it among those that have not said who they are."""
        self._connections[connection.number] = connection
        open_ones = [one for one in self._connections.values() if not one.is_closing]  # many come before one is gone
        alike = [one for one in open_ones if one.address == connection.address]
        unknown = [one for one in open_ones if not self.broker.is_in(one.number)]
        unknown_alike = [one for one in unknown if one.address == connection.address]
        if len(unknown_alike) > MOST_UNKNOWN_OF_ADDRESS:
            unknown_alike[0].abort("did not say who it is, and others came")
        elif len(unknown) > MOST_UNKNOWN or (unknown and len(open_ones) > self._most):
            unknown[0].abort("did not say who it is, and others came")
        elif len(alike) > MOST_OF_ADDRESS:
            connection.abort(f"has {MOST_OF_ADDRESS} connections already")

    def take(self, connection: Connection, packet: Packet) -> int:
        """Have the broker take in a packet; return how many bytes that was answered with.

        Raises ProtocolError for a user that comes anew instead of resting: each time its last will would be spread.
        """
        spent = self._allowances.get(packet.user) if isinstance(packet, Connect) else None
        if spent and spent.is_spent:
            raise ProtocolError("said too much on connections before this one")
        done = self.broker.take(connection.number, packet)
        if isinstance(packet, Connect) and (found := self.broker.user_of(connection.number)):
            connection.allowance = self._allowances.setdefault(found[0], connection.allowance)
        self._carry_out(done)
        return sum(one.size_bytes for one in done if isinstance(one, Send) and one.connection == connection.number)

    def lose(self, connection: Connection) -> None:
        """A connection ended."""
        self._connections.pop(connection.number, None)
        self._carry_out(self.broker.leave(connection.number))

    def has_too_much_to_send(self, connection: Connection) -> bool:
        """Whether more waits for all together than may, and the most for `connection`."""
        waiting = [one.transport.get_write_buffer_size() for one in self._connections.values() if not one.is_closing]
        return sum(waiting) > MOST_TO_SEND_IN_ALL and connection.transport.get_write_buffer_size() == max(waiting)

    def has_taken_too_much(self) -> bool:
        """Whether the packets that are not whole yet are too much together."""
        return sum(len(one.data) for one in self._connections.values()) > MOST_TAKEN_IN_ALL

    def note(self, address: str, why: str) -> None:
        """Note for the log that a connection was dropped."""
        if why:
            is_known = (address, why) in self._dropped or len(self._dropped) < MOST_UNKNOWN
            self._dropped[(address, why) if is_known else ("other addresses", "various causes")] += 1

    def note_mistake(self, error: object) -> None:
        """Note for the log what went wrong here, such as that no files are left."""
        text = f"{error!r}"[:MOST_LETTERS]
        self._mistakes[text if text in self._mistakes or len(self._mistakes) < MOST_TOLD else "more mistakes"] += 1

    def _make(self) -> Connection:
        self._number += 1
        return Connection(self, self._number)

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for one in instructions:
            connection = self._connections.get(one.connection)
            if connection is not None and isinstance(one, Send):
                connection.send(one.data, one.payload)
            elif connection is not None and not isinstance(one, Send):
                connection.close(one.why)

    def _sweep(self) -> None:
        """End who has been silent for too long, and tell what was refused."""
        now_s = time.monotonic()
        for one in list(self._connections.values()):
            silent_s = now_s - one.heard_s
            if not self.broker.is_in(one.number) and now_s - one.since_s > UNKNOWN_S:
                one.abort("did not say who it is")
            elif silent_s > one.silence_s:
                one.abort(f"was silent for {silent_s:.0f} s")
        if now_s - self._told_s >= TELL_S and (self._dropped or self.broker.refused or self._mistakes):
            self._told_s = now_s
            lines = [f"{text}, {n} times" for text, n in self._mistakes.most_common()]
            lines += [f"dropped {n} connections of {who}: {why}" for (who, why), n in self._dropped.most_common()]
            lines += [f"refused {n} messages of user {who}" for who, n in self.broker.refused.most_common()]
            for line in lines[:MOST_TOLD]:
                self._tell(line)
            if len(lines) > MOST_TOLD:
                self._tell(f"and {len(lines) - MOST_TOLD} more of the kind")
            self._mistakes.clear()
            self._dropped.clear()
            self.broker.refused.clear()
