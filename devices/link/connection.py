"""A connection to one peer, chosen by measuring all addresses of the peer, then used by one sender at a time.

Several addresses of a device are several network cards, of which some may be slow or unreachable. `Opening` connects
to all of them, sends the same probes to each, and keeps the connection whose echoes come back first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edge_run.base.errors import DeviceLost
from edge_run.base.extras import MESH, need
from edge_run.base.fields import Document
from edge_run.base.mesh import LinkRate
from edge_run.devices.link.frames import FrameKind, Head, message_of, unpack

if TYPE_CHECKING:
    import zmq

PROBE_BYTES = (64, 64, 16 << 10, 16 << 10)  # the last is what a token's activation has at width 4096
RATE_PROBE_BYTES = (*[64] * 8, 16 << 10, 64 << 10, 256 << 10, *[2 << 20] * 3)
LONG_PROBE_S = 0.2  # what takes longer is not repeated, and larger ones are not tried: so much says enough
OPEN_S, BETTER_S = 3.0, 0.25  # how long all may take; how long to wait for a better one than the first
RETRY_S = 0.15  # after which whoever does not know us is asked again
MOST_ABSENCES = 4
NOT_NOW = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # what may be better in a moment
HEARTBEAT_S, SILENCE_S = 0.5, 1.5
SEND_QUEUE = 16  # messages
SEND_BUFFER_BYTES = 128 << 10  # of the kernel, which takes twice that: a heartbeat waits behind it, 1 s at 2 Mbit/s
_SLICE_MS = 50
_numbering, _latest_number = threading.Lock(), [0]


@dataclass(frozen=True, slots=True)
class Peer:
    """The data link of a member.

    incarnation: of the member.
    key: the public key of its link.
    places: the addresses on which it listens.
    """

    node: str
    incarnation: str
    key: str
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Keys:
    """The key pair of this device's link, made anew at each start, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


class Candidate:
    """A connection to one address, while it is measured."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], place: str, peer: Peer, keys: Keys) -> None:
        """Raises ZMQError where there can be no connection now, or never."""
        zmq = need("zmq", MESH)
        self.place, self.error = place, ""
        self.times_s: dict[int, float] = {}
        self._sent_s, self._next, self._is_ready = 0.0, 0, False
        self._retry_s: float | None = None
        self._absences = 0
        self._events = {
            zmq.EVENT_HANDSHAKE_SUCCEEDED: "ready",
            zmq.EVENT_DISCONNECTED: "broken",
            zmq.EVENT_CONNECT_RETRIED: "absent",
            zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused",
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "refused",
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "refused",
        }
        self.socket = context.socket(zmq.DEALER)
        try:
            self._set_up(peer, keys)
            self.monitor = self.socket.get_monitor_socket(sum(self._events))
            self.socket.connect(place)
        except BaseException:
            with contextlib.suppress(zmq.ZMQError):
                self.socket.disable_monitor()
            self.socket.close(0)
            raise

    def _set_up(self, peer: Peer, keys: Keys) -> None:
        zmq, place = need("zmq", MESH), self.place
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, int("[" in place)),
            (zmq.SNDHWM, SEND_QUEUE),
            (zmq.RCVHWM, SEND_QUEUE),
            (zmq.IMMEDIATE, 1),
            (zmq.SNDBUF, SEND_BUFFER_BYTES),
            (zmq.MAXMSGSIZE, 1 << 10),  # nothing comes back on it but echoes
            (zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1e3)),
            (zmq.HEARTBEAT_TIMEOUT, int(SILENCE_S * 1e3)),
            (zmq.HEARTBEAT_TTL, int(2 * SILENCE_S * 1e3)),
            (zmq.CONNECT_TIMEOUT, int(OPEN_S * 1e3)),
            (zmq.HANDSHAKE_IVL, int(OPEN_S * 1e3)),
            (zmq.RECONNECT_IVL, 100),
            (zmq.CURVE_PUBLICKEY, keys.public),
            (zmq.CURVE_SECRETKEY, keys.secret),
            (zmq.CURVE_SERVERKEY, peer.key.encode()),
        ):
            self.socket.setsockopt(option, value)

    def watch(self) -> str:
        """Return what the monitor says next: ready, broken, refused, absent; empty when nothing."""
        zmq = need("zmq", MESH)
        try:
            message = self.monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return ""
        return self._events.get(int.from_bytes(message[0][:2], "little"), "")

    def advance(self, sizes: Sequence[int]) -> bool:
        """Take in what came, send the next probe; return whether all have their echo."""
        zmq = need("zmq", MESH)
        while word := self.watch():
            if word == "ready":
                self._is_ready, self.error, self._next = True, "", 0
                self._probe(sizes[0])
            elif word == "refused":
                self.error = f"{self.place}: does not take this device's key, or has another one than it announced"
                self._retry_s = time.monotonic() + RETRY_S
            elif word == "absent" and not _has_files():
                self.error = f"{self.place}: cannot be tried now, too many files are open"
            elif word == "absent":
                self._absences += 1
                self.error = f"{self.place}: nothing listens there"
            else:
                self._is_ready, self.error = False, self.error or f"{self.place}: the connection broke"
        if self._retry_s is not None and time.monotonic() >= self._retry_s:  # he may have heard of us meanwhile
            self._retry_s = None
            self.socket.disconnect(self.place)
            self.socket.connect(self.place)
        while self._is_ready and self._next < len(sizes):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            head = unpack(memoryview(frames[0]))  # what is none costs its sender: `Opening` is told
            if head.kind is not FrameKind.ECHO or head.sequence != self._next:
                continue
            took_s, size = time.perf_counter() - self._sent_s, sizes[self._next]
            self.times_s[size] = min(took_s, self.times_s.get(size, took_s))
            self._next = _next_probe(self._next, sizes, took_s)
            if self._next < len(sizes):
                self._probe(sizes[self._next])
        return self._is_ready and self._next == len(sizes)

    @property
    def rate(self) -> LinkRate:
        """What was measured, once there were echoes of probes of two sizes."""
        least, most = min(self.times_s), max(self.times_s)
        round_trip_s, large_s = self.times_s[least], self.times_s[most]
        return LinkRate(self.place, round_trip_s, (most - least) / max(1e-9, large_s - round_trip_s))

    @property
    def is_hopeless(self) -> bool:
        """Whether nobody listens there any more: an address is for one incarnation of a peer only."""
        return bool(self.error) and self._absences >= MOST_ABSENCES

    def close(self) -> None:
        """Close it."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)

    def _probe(self, size: int) -> None:
        zmq = need("zmq", MESH)
        frames = message_of(Head(FrameKind.PROBE, 0, self._next, {}), [bytes(size)])
        self._sent_s = time.perf_counter()
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # it broke meanwhile, as the monitor is about to say: whoever waited might wait for ever
            self._is_ready, self.error = False, self.error or f"{self.place}: the connection broke"


class Opening:
    """The search for the best connection to a peer, on sockets that the link's thread polls."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        peer: Peer,
        keys: Keys,
        sizes: Sequence[int] = PROBE_BYTES,
        *,
        is_patient: bool = False,
    ) -> None:
        """is_patient: a place where nothing listens is waited for as one that does not answer; nobody learns which."""
        self.peer, self._sizes, self._is_patient = peer, sizes, is_patient
        self._context, self._keys = context, keys
        self.candidates: list[Candidate] = []
        self.failures: list[str] = []
        self._unopened = deque(peer.places)
        self._open_s = 0.0
        self.deadline_s = time.monotonic() + OPEN_S
        self._done: list[Candidate] = []

    def advance(self) -> bool:
        """Take in what came; return whether the search is over."""
        if self._unopened and time.monotonic() >= self._open_s:
            self._open()
        for candidate in self.candidates:
            if candidate not in self._done and candidate.advance(self._sizes):
                self._done.append(candidate)
                self.deadline_s = min(self.deadline_s, time.monotonic() + BETTER_S)
        is_over = not self._unopened and all(
            one in self._done or (one.is_hopeless and not self._is_patient) for one in self.candidates
        )
        return is_over or time.monotonic() >= self.deadline_s

    def _open(self) -> None:
        """Begin to connect to each place; where no files are left now, go on later."""
        zmq = need("zmq", MESH)
        while self._unopened:
            try:
                self.candidates.append(Candidate(self._context, self._unopened[0], self.peer, self._keys))
            except zmq.ZMQError as error:
                if error.errno in NOT_NOW:
                    self._open_s = time.monotonic() + RETRY_S
                    return
                self.failures.append(f"{self._unopened[0]}: cannot be tried ({error})")
            self._unopened.popleft()

    def best(self) -> Candidate | None:
        """Return the connection over which a token's activation arrives soonest; None where no echo came."""
        return min(self._done, key=lambda one: _activation_s(one.rate), default=None)

    def why_not(self) -> str:
        """Return why there is no connection, in words."""
        reasons = [one.error or f"{one.place}: does not answer" for one in self.candidates]
        nowhere = "it announced no address that may be tried from here; on it, edge-run mesh join --listen 0.0.0.0"
        unopened = [f"{place}: cannot be tried now, too many files are open" for place in self._unopened]
        return "; ".join([*reasons, *self.failures, *unopened]) or nowhere

    def close(self, but: Candidate | None = None) -> None:
        """Close what was not chosen."""
        for candidate in self.candidates:
            if candidate is not but:
                candidate.close()


class PeerConnection:
    """The chosen connection to a peer. Senders take turns; the link's thread watches and closes it."""

    def __init__(self, peer: Peer, candidate: Candidate, *, is_talked_to: bool) -> None:
        """is_talked_to: there is a conversation, so that its end is a loss."""
        self.peer, self.candidate, self.rate, self.is_talked_to = peer, candidate, candidate.rate, is_talked_to
        self.used_s = time.monotonic()
        self._number = _next_number()
        self._sequence = 0
        self._turn = threading.RLock()
        self._why = ""

    def leads_to(self, peer: Peer | None) -> bool:
        """Whether it is to `peer`, as it is now: the same start of it, which may be reached by other ways too."""
        if peer is None or (peer.incarnation, peer.key) != (self.peer.incarnation, self.peer.key):
            return False
        return self.candidate.place in peer.places

    def send(self, kind: FrameKind, header: Document, parts: Sequence[memoryview | bytes], deadline_s: float) -> None:
        """Hand over a message; parts are copied. Raises DeviceLost where it is not taken in time, or all is over."""
        zmq = need("zmq", MESH)
        try:
            if not self._turn.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                raise self._lost("another message takes too long")
            frames = message_of(Head(kind, self._number, self._sequence, header), parts)
            while not self._why:
                try:
                    self.candidate.socket.send_multipart(frames, zmq.NOBLOCK)
                except zmq.Again:
                    if time.monotonic() >= deadline_s:
                        raise self._lost("it does not take messages in time") from None
                    self.candidate.socket.poll(_SLICE_MS, zmq.POLLOUT)
                    continue
                self._sequence += 1
                self.used_s = time.monotonic()
                self.is_talked_to |= kind in (FrameKind.DATA, FrameKind.BULK)
                return
            raise self._lost(self._why)
        finally:
            try:  # noqa: SIM105 -- `suppress` is Python: Ctrl-C within it would leave the lock taken
                self._turn.release()
            except RuntimeError:  # it was not had
                pass

    def close(self, why: str) -> None:
        """End it; who is sending gets DeviceLost. Called by the link's thread."""
        self._why = why
        with self._turn:
            self.candidate.close()

    def _lost(self, why: str) -> DeviceLost:
        return DeviceLost(f"{why}, at {self.candidate.place}", node=self.peer.node)


def _next_number() -> int:
    """Return a number for a connection, later than all before, also where the clock was put back."""
    with _numbering:
        _latest_number.append(max(time.time_ns(), _latest_number.pop() + 1))
        return _latest_number[0]


def _has_files() -> bool:
    """Whether this process can open a file now; without one it cannot connect, whoever listens."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in NOT_NOW
    return True


def _next_probe(number: int, sizes: Sequence[int], took_s: float) -> int:
    """Return which probe follows `number`: on a slow link one of the second size is enough."""
    if took_s <= LONG_PROBE_S:
        return number + 1
    larger = next((i for i, size in enumerate(sizes) if size > sizes[number]), len(sizes))
    return larger if sizes[number] == sizes[0] else len(sizes)


def _activation_s(rate: LinkRate) -> float:
    return rate.round_trip_s + PROBE_BYTES[-1] / rate.bytes_per_s
