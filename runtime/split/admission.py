"""Decides whom a split server serves: who may be connected, and whose frames are computed. Without I/O.

A newcomer gets a slot while there is one, or while some client is silent for longer than a device ever is; else it is
told so. Devices that send others away would be sent away by them in turn, and none would be served. Clients are not
asked who they are, so slots are counted by address: one address can fill neither the server nor its memory.

Frames are computed first come, first served, and none for nobody. A server that has too much to do would else compute
only frames that nobody waits for any more, one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address

from edge_run.base.units import MIB
from edge_run.partition.split_choice import Average

MOST_PLACES, MOST_OF_AN_ADDRESS = 64, 16
MOST_HELD_BYTES = 128 * MIB  # of requests that are being received or wait for their turn, and of answers being sent
LEAST_SILENCE_S = 6.0  # of who makes room for a newcomer: a device says something twice as often
_NETWORK_BITS = 64  # of an IPv6 address: who has one has all of its network


class NoSlot(Exception):
    """All slots are taken, and nobody makes room."""


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
    least_silence_s: float = LEAST_SILENCE_S
    _taken: list[ConnectionSlot] = field(default_factory=list)

    def enter(self, address: str, give_up: Callable[[], None], now_s: float) -> ConnectionSlot:
        """Return a slot for a connection from `address`. Raises NoSlot."""
        network = _network(address)
        own = [slot for slot in self._taken if slot.address == network]
        is_crowded = len(own) >= self.most_of_an_address
        is_full = is_crowded or len(self._taken) >= self.most
        if is_full and not self._make_room(own if is_crowded else self._taken, now_s):
            most, where = (self.most_of_an_address, " from this address") if is_crowded else (self.most, "")
            raise NoSlot(f"it has {most} connections{where}, its most, and a device takes two")
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
        """Send away who has been silent the longest: the machine has no room for as many as there are slots."""
        self._send_away(self._taken)

    def _make_room(self, slots: Sequence[ConnectionSlot], now_s: float) -> bool:
        """End one connection among `slots` that has been silent for too long; return whether there was one.

        It is that of the address that has the most slots.
        """
        counts = Counter(slot.address for slot in self._taken)
        before_s = now_s - self.least_silence_s
        silent = [slot for slot in slots if slot.silent_since_s is not None and slot.silent_since_s < before_s]
        most = max((counts[slot.address] for slot in silent), default=0)
        return self._send_away(slot for slot in silent if counts[slot.address] == most)

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


@dataclass(eq=False, slots=True)
class QueuedFrame:
    """One frame.

    kind: frames of one kind take about the same time.
    until_s: its device waits until then.
    is_gone: whether its device has gone.
    had_to_wait: another one was there when it came.
    begun_s: when it began to be computed; None before.
    """

    kind: Hashable
    until_s: float
    is_gone: Callable[[], bool]
    had_to_wait: bool
    begun_s: float | None = None


@dataclass(slots=True)
class FrameQueue:
    """The queue of a server. Not thread-safe. Its owner calls `leave` for each frame that came."""

    _seconds: dict[Hashable, Average] = field(default_factory=dict)
    _frames: list[QueuedFrame] = field(default_factory=list)

    def took(self, kind: Hashable, seconds: float) -> None:
        """Note that a frame of this kind was computed in so many seconds."""
        self._seconds.setdefault(kind, Average()).add(seconds)

    def usual_s(self, kind: Hashable) -> float:
        """Return how long a frame of this kind takes; 0 before the first."""
        known = self._seconds.get(kind)
        return 0.0 if known is None or known.value is None else known.value

    def come(self, kind: Hashable, until_s: float, is_gone: Callable[[], bool]) -> QueuedFrame:
        """Return the place of a frame that has come."""
        frame = QueuedFrame(kind, until_s, is_gone, bool(self._frames))
        self._frames.append(frame)
        return frame

    def wait_s(self, now_s: float, frame: QueuedFrame | None = None) -> float:
        """Return for how long `frame` will wait yet; None is one that comes now."""
        before = self._frames if frame is None else self._frames[: self._frames.index(frame)]
        return sum(self._left_s(one, now_s) for one in before)

    def refusal(self, frame: QueuedFrame, now_s: float) -> str:
        """Return why `frame` is not to be computed; empty where it is.

        One that had to wait must also be done in time, as far as is known. One that came alone need not: what is known
        may be wrong, and would stay so if nothing were computed.
        """
        wait_s = self.wait_s(now_s, frame)
        done_s = now_s + wait_s + (self.usual_s(frame.kind) if frame.had_to_wait else 0.0)
        if done_s < frame.until_s:
            return ""
        patience_s = max(frame.until_s - now_s, 0.0)
        return (
            f"busy: {wait_s:.2g} s of other frames come first, and {patience_s:.2g} s are left of the time for this one"
        )

    def begin(self, frame: QueuedFrame, now_s: float) -> None:
        """Note that `frame` is being computed."""
        frame.begun_s = now_s

    def leave(self, frame: QueuedFrame) -> None:
        """Note that `frame` is done, refused, or given up."""
        self._frames.remove(frame)

    def _left_s(self, frame: QueuedFrame, now_s: float) -> float:
        """Return how long the server has yet to do with a frame: nothing, where it would be for nobody."""
        if frame.begun_s is not None:
            return max(self.usual_s(frame.kind) - (now_s - frame.begun_s), 0.0)
        return 0.0 if frame.is_gone() or frame.until_s <= now_s else self.usual_s(frame.kind)


def _network(address: str) -> str:
    """Return what counts as one address: an IPv6 network, and an IPv4 address however it is written."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None and not found.is_loopback:
        return str(int(found) >> (128 - _NETWORK_BITS))
    return str(getattr(found, "ipv4_mapped", None) or found)
