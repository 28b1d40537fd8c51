"""Which way a frame goes: computed here, as a code to the server, or as an image to the server.

A state machine without I/O: measurements go in, a mode comes out. The seconds of a mode are the sum of the device's
computing, the network (round trip, and bytes over the bandwidth), and the server's queue and computing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

LOCAL, CODE, IMAGE = "local", "code", "image"
HYSTERESIS = 0.03  # another mode must be faster by this share
SMOOTHING = 0.25  # weight of a new measurement
SURPRISE = 1.5  # two measurements in turn that are off by this factor in one direction replace the average
SMALL_BYTES = 64  # what has no more shows the round trip, not the bandwidth
LOCAL_MARGIN = 1.3  # of its usual time, what computing a frame on the device is given
SERVER_MARGIN = 2.0  # of its usual time, what an answer of the server is given at least
LEAST_PATIENCE = 0.5  # of the deadline, for the server, where the device could not make it in time anyway
ROUND_TRIPS = 5  # the least of so many counts: the others waited behind something
MOST_PAUSE_FRAMES = 1024  # after which frames of a kind that is refused again and again are tried once more
_LEAST_S_PER_BYTE = 1e-10


@dataclass(slots=True)
class _Pause:
    """For how many frames a kind of mode is left out, twice as many each time that it is refused in turn."""

    left_frames: int = 0
    next_frames: int = 1


@dataclass(frozen=True, slots=True)
class Mode:
    """A way for a frame.

    kind: `local`, `code` or `image`.
    rate: the rate of a code; 0 for the other kinds.
    """

    kind: str
    rate: int = 0

    @property
    def name(self) -> str:
        """The name, such as `local`, `image` or `code 2`."""
        return f"{self.kind} {self.rate}" if self.kind == CODE else self.kind


class Average:
    """A moving average that follows a sudden change with the second measurement that shows it."""

    def __init__(self, value: float | None = None) -> None:
        self.value = value
        self._surprises = 0

    def add(self, sample: float) -> None:
        """Take in a measurement, 0 or more."""
        if self.value is None:
            self.value = sample
            return
        before = max(self.value, 1e-12)
        direction = 1 if sample > before * SURPRISE else -1 if sample < before / SURPRISE else 0
        self._surprises = self._surprises + direction if direction and direction * self._surprises >= 0 else direction
        if abs(self._surprises) >= 2:
            self.value, self._surprises = sample, 0
        else:
            self.value += SMOOTHING * (sample - self.value)


class Chooser:
    """Chooses among `modes`; of two that are equally fast, the earlier one is preferred. Not thread-safe.

    All seconds and sizes are measured; before the first measurement of a way, its first estimate counts.
    """

    def __init__(self, modes: Sequence[Mode], device_s: dict[str, float], server_s: dict[str, float]) -> None:
        """Take the first estimates: the seconds that each kind of mode computes on the device, and on the server."""
        self._modes = tuple(modes)
        self._device = {kind: Average(seconds) for kind, seconds in device_s.items()}
        self._server = {kind: Average(seconds) for kind, seconds in server_s.items()}
        self._queue, self._s_per_byte = Average(0.0), Average()
        self._round_trips: deque[float] = deque(maxlen=ROUND_TRIPS)
        self._sizes: dict[Mode, Average] = {}
        self._pauses: dict[str, _Pause] = {}
        self._current: Mode | None = None
        self.has_server = False

    @property
    def round_trip_s(self) -> float | None:
        """Measured round trip of a small message; None before the first."""
        return min(self._round_trips, default=None)

    @property
    def bytes_per_s(self) -> float | None:
        """Measured bandwidth; None before the first measurement."""
        return None if self._s_per_byte.value is None else 1 / max(self._s_per_byte.value, _LEAST_S_PER_BYTE)

    def server_back(self, server_s: dict[str, float]) -> None:
        """Note that the server is there, and its seconds of computing for each kind of mode."""
        self.has_server = True
        self._server = {kind: Average(seconds) for kind, seconds in server_s.items()}
        self._queue = Average(0.0)
        self._pauses.clear()

    def server_lost(self) -> None:
        """Note that the server does not answer: frames are local until it is back, and the link is measured anew."""
        self.has_server = False
        self._round_trips.clear()
        self._s_per_byte = Average()

    def computed(self, kind: str, seconds: float) -> None:
        """Note the seconds that the device took for its part of a mode of this kind."""
        self._device.setdefault(kind, Average()).add(seconds)

    def sized(self, mode: Mode, size_bytes: int) -> None:
        """Note the bytes of a frame in this mode."""
        self._sizes.setdefault(mode, Average()).add(size_bytes)

    def crossed(self, sent_bytes: int, network_s: float) -> None:
        """A message of this size was answered; of the time, this was not the server's queue or computing."""
        if sent_bytes <= SMALL_BYTES:
            self._round_trips.append(max(network_s, 0.0))
        elif self.round_trip_s is not None:
            left_s = max(network_s - self.round_trip_s, 0.0)
            self._s_per_byte.add(max(left_s / sent_bytes, _LEAST_S_PER_BYTE))

    def served(self, kind: str, queue_s: float, server_s: float) -> None:
        """The server let a frame of this kind wait for so long, and computed for so long."""
        self._queue.add(queue_s)
        self._server.setdefault(kind, Average()).add(server_s)
        self._pauses.pop(kind, None)

    def refused(self, kind: str) -> None:
        """The server is there, and refused a frame of this kind: the next ones go other ways, in turn ever more."""
        pause = self._pauses.setdefault(kind, _Pause())
        pause.left_frames = pause.next_frames
        pause.next_frames = min(2 * pause.next_frames, MOST_PAUSE_FRAMES)

    def expected_s(self, mode: Mode) -> float | None:
        """Return how long a frame would take in `mode`; None where that cannot be known yet, or not be done now."""
        device = self._device.get(mode.kind)
        if device is None or device.value is None:
            return None
        if mode.kind == LOCAL:
            return device.value
        away_s = self._away_s(mode)
        return None if away_s is None else device.value + away_s

    def patience_s(self, mode: Mode, deadline_s: float, spent_s: float) -> float:
        """Return how long the server may take for a frame in `mode`, of whose deadline `spent_s` are over.

        That is what leaves the device time to answer where the server does not; but at least twice what the server
        usually takes, and all that is left where the device could not answer in time anyway.
        """
        left_s, local_s = deadline_s - spent_s, self.expected_s(Mode(LOCAL)) or 0.0
        if local_s >= left_s:
            return max(left_s, LEAST_PATIENCE * deadline_s)
        least_s = min(SERVER_MARGIN * (self._away_s(mode) or 0.0), left_s)
        return max(left_s - LOCAL_MARGIN * local_s, least_s)

    def _away_s(self, mode: Mode) -> float | None:
        """Return how long the network and the server would take in `mode`; None as for `expected_s`."""
        size, server = self._sizes.get(mode), self._server.get(mode.kind)
        parts = (size, server, self._s_per_byte, self._queue)
        known = [part.value for part in parts if part is not None and part.value is not None]
        if not self.has_server or len(known) < len(parts) or self.round_trip_s is None:
            return None
        size_bytes, server_s, s_per_byte, queue_s = known
        return self.round_trip_s + size_bytes * s_per_byte + queue_s + server_s

    def choose(self) -> Mode:
        """Return the mode for the next frame: the fastest; the last one while no other is clearly faster."""
        paused = {kind for kind, pause in self._pauses.items() if pause.left_frames}
        for kind in paused:
            self._pauses[kind].left_frames -= 1
        modes = [mode for mode in self._modes if mode.kind not in paused]
        expected = {mode: seconds for mode in modes if (seconds := self.expected_s(mode)) is not None}
        if not expected:
            self._current = Mode(LOCAL)
            return self._current
        best_s = min(expected.values())
        now_s = None if self._current is None else expected.get(self._current)
        if self._current is None or now_s is None or now_s > best_s * (1 + HYSTERESIS):
            self._current = next(mode for mode, seconds in expected.items() if seconds <= best_s * 1.01)
        return self._current
