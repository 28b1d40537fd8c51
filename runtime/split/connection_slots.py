"""Decides who may be connected to a split server, and who makes room for others. Without I/O.

A newcomer gets a slot as long as some client is silent. Clients are not asked who they are, so slots are counted by
address: one address can fill neither the server nor its memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address

from edge_run.base.units import MIB

MOST_PLACES, MOST_OF_AN_ADDRESS = 64, 16
MOST_HELD_BYTES = 128 * MIB  # of requests that are being received or wait for their turn, and of answers being sent
_NETWORK_BITS = 64  # of an IPv6 address: who has one has all of its network


@dataclass(eq=False, slots=True)
class ConnectionSlot:
    """One connection.

    address: what counts as one address, as of `_network`.
    give_up: ends the connection.
    silent_since_s: when its last whole request was answered, or an answer to it began; None while that is computed.
    held_bytes: of a request that is being received, or an answer that is being sent.
    """

    address: str
    give_up: Callable[[], None]
    silent_since_s: float | None
    held_bytes: int = 0


@dataclass(slots=True)
class ConnectionSlots:
    """The slots of a server. Not thread-safe. Its owner calls `leave` for every slot that it got, once or twice."""

    most: int = MOST_PLACES
    most_of_an_address: int = MOST_OF_AN_ADDRESS
    most_bytes: int = MOST_HELD_BYTES
    _taken: list[ConnectionSlot] = field(default_factory=list)

    def enter(self, address: str, give_up: Callable[[], None], now_s: float) -> ConnectionSlot | None:
        """Return a slot for a connection from `address`; None where all are taken, and nobody is silent."""
        network = _network(address)
        own = [slot for slot in self._taken if slot.address == network]
        is_crowded = len(own) >= self.most_of_an_address
        if (is_crowded or len(self._taken) >= self.most) and not self._send_away(own if is_crowded else self._crowd()):
            return None
        slot = ConnectionSlot(network, give_up, now_s)
        self._taken.append(slot)
        return slot

    def hold(self, slot: ConnectionSlot, more_bytes: int) -> None:
        """Note that what is held for `slot` grew; when all take too much, who has been silent the longest goes."""
        slot.held_bytes += more_bytes
        while sum(one.held_bytes for one in self._taken) > self.most_bytes:
            held: Counter[str] = Counter()
            for one in self._taken:
                held[one.address] += one.held_bytes
            largest = max(held, key=held.__getitem__)
            if not self._send_away(one for one in self._taken if one.address == largest and one.held_bytes):
                return self._dismiss(slot)
        return None

    def begin_answer(self, slot: ConnectionSlot) -> None:
        """Note that a whole request of `slot` is here: it is not silent until that is answered."""
        slot.silent_since_s = None

    def begin_sending(self, slot: ConnectionSlot, answer_bytes: int, now_s: float) -> None:
        """Note that an answer takes the place of its request: who does not read it is silent."""
        slot.held_bytes, slot.silent_since_s = 0, now_s
        self.hold(slot, answer_bytes)

    def answered(self, slot: ConnectionSlot, now_s: float) -> None:
        """Note that a request of `slot` is answered: what it held is free, and it is silent from now on."""
        slot.held_bytes, slot.silent_since_s = 0, now_s

    def leave(self, slot: ConnectionSlot) -> None:
        """Free a slot."""
        if slot in self._taken:
            self._taken.remove(slot)

    def make_room(self) -> None:
        """Send away who has been silent the longest, of the address that has the most slots."""
        self._send_away(self._crowd())

    def _crowd(self) -> list[ConnectionSlot]:
        counts = Counter(slot.address for slot in self._taken)
        return [slot for slot in self._taken if counts[slot.address] == max(counts.values())]

    def _send_away(self, slots: Iterable[ConnectionSlot]) -> bool:
        """End the connection among `slots` that has been silent the longest; return whether there was one."""
        silent = [(slot.silent_since_s, number, slot) for number, slot in enumerate(slots)]
        ranked = sorted(one for one in silent if one[0] is not None)
        if ranked:
            self._dismiss(ranked[0][2])
        return bool(ranked)

    def _dismiss(self, slot: ConnectionSlot) -> None:
        self.leave(slot)
        slot.give_up()


def _network(address: str) -> str:
    """Return what counts as one address: an IPv6 network, and an IPv4 address however it is written."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None and not found.is_loopback:
        return str(int(found) >> (128 - _NETWORK_BITS))
    return str(getattr(found, "ipv4_mapped", None) or found)
