"""Which way a frame goes: computed here, as a code to the server, or as an image to the server.

A state machine without I/O: measurements go in, a mode comes out. The seconds of a mode are the sum of the device's
computing, the network (round trip, and bytes both ways over the bandwidth), and the server's queue and computing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
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
MOST_PAUSE_FRAMES = 1024  # after which frames of a kind that fails again and again are tried once more
TRIAL_SHARE = 0.02  # of the time of all frames, what those of a kind take that are only sent to measure it
_LEAST_S_PER_BYTE = 1e-10


@dataclass(slots=True)
class _Pause:
    """For how many frames a kind of mode is left out, twice as many each time that it fails in turn.

    is_its_own: another kind was answered meanwhile, so it is not the server that fails.
    """

    left_frames: int = 0
    next_frames: int = 1
    is_its_own: bool = False


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


@dataclass(frozen=True, slots=True)
class FrameCost:
    """What a server says of the frames of one kind: its seconds of computing, and the bytes of an answer."""

    seconds: float
    answer_bytes: int


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

    All seconds and sizes are measured; before the first measurement of a way, its first estimate counts. A way that is
    not taken is measured by a frame now and then, since what made it slow may be over.
    """

    def __init__(self, modes: Sequence[Mode], device_s: Mapping[str, float]) -> None:
        """Take the first estimates: the seconds that each kind of mode computes on the device."""
        self._modes = tuple(modes)
        self._device = {kind: Average(seconds) for kind, seconds in device_s.items()}
        self._server: dict[str, Average] = {}
        self._answers: dict[str, Average] = {}  # their bytes
        self._queue, self._s_per_byte = Average(), Average()
        self._round_trips: deque[float] = deque(maxlen=ROUND_TRIPS)
        self._sizes: dict[Mode, Average] = {}
        self._pauses: dict[str, _Pause] = {}
        self._unused_s: dict[str, float] = {}  # of each kind: what the frames since its last one took, as expected
        self._current: Mode | None = None
        self._is_trial = False  # the frame that was chosen last
        self.has_server = False

    @property
    def round_trip_s(self) -> float | None:
        """Measured round trip of a small message; None before the first."""
        return min(self._round_trips, default=None)

    @property
    def bytes_per_s(self) -> float | None:
        """Measured bandwidth; None before the first measurement."""
        return None if self._s_per_byte.value is None else 1 / max(self._s_per_byte.value, _LEAST_S_PER_BYTE)

    def server_back(self, costs: Mapping[str, FrameCost], queue_s: float) -> None:
        """Note that the server is there, what it says of each kind of mode, and how long a frame would wait now."""
        self.has_server = True
        self._server = {kind: Average(one.seconds) for kind, one in costs.items()}
        self._answers = {kind: Average(one.answer_bytes) for kind, one in costs.items()}
        self._queue = Average(queue_s)

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

    def crossed(self, both_ways_bytes: int, network_s: float) -> None:
        """So many bytes, message and answer, crossed the link; this was not the server's queue or computing."""
        if both_ways_bytes <= SMALL_BYTES:
            self._round_trips.append(max(network_s, 0.0))
        elif self.round_trip_s is not None:
            left_s = max(network_s - self.round_trip_s, 0.0)
            self._s_per_byte.add(max(left_s / both_ways_bytes, _LEAST_S_PER_BYTE))

    def queued(self, queue_s: float) -> None:
        """At the server a frame waited for so long, or would wait now."""
        self._queue.add(queue_s)

    def served(self, kind: str, server_s: float, answer_bytes: int) -> None:
        """The server computed a frame of this kind for so long, and gave an answer of this size."""
        self._server.setdefault(kind, Average()).add(server_s)
        self._answers.setdefault(kind, Average()).add(answer_bytes)
        self._pauses.pop(kind, None)
        for pause in self._pauses.values():
            pause.is_its_own = True

    def refused(self, kind: str) -> None:
        """The server is there, and refused a frame of this kind: the next ones go other ways, in turn ever more."""
        pause = self._pauses.setdefault(kind, _Pause())
        pause.left_frames = pause.next_frames
        pause.next_frames = min(2 * pause.next_frames, MOST_PAUSE_FRAMES)

    def unanswered(self, kind: str) -> None:
        """The server did not answer a frame of this kind: as `refused`, and other kinds are left out half as long.

        For it may be the server; once it answers frames of other kinds, it is this kind. A pause outlasts the loss of
        the server: one that has too much to do can be connected to all the time.
        """
        self.refused(kind)
        mine = self._pauses[kind]
        for other in {mode.kind for mode in self._modes} - {LOCAL, kind}:
            pause = self._pauses.setdefault(other, _Pause())
            if not mine.is_its_own:
                pause.left_frames = max(pause.left_frames, mine.left_frames // 2)

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
        """Return how long the server may take for the frame that was chosen last, of whose deadline `spent_s` are over.

        That is what leaves the device time to answer where the server does not; but, unless the frame is a trial, at
        least twice what the server usually takes, and all that is left where the device could not answer in time
        anyway.
        """
        left_s, local_s = deadline_s - spent_s, self.expected_s(Mode(LOCAL)) or 0.0
        if local_s >= left_s:
            return max(left_s, LEAST_PATIENCE * deadline_s)
        least_s = 0.0 if self._is_trial else min(SERVER_MARGIN * (self._away_s(mode) or 0.0), left_s)
        return max(left_s - LOCAL_MARGIN * local_s, least_s)

    def choose(self, deadline_s: float) -> Mode:
        """Return the mode for the next frame: the fastest; the last one while no other is clearly faster.

        Now and then it is one of a kind that is slower, to measure that again: see `_trial`.
        """
        expected = self._expected()
        self._is_trial = False
        if not expected:
            self._current = Mode(LOCAL)
            return self._current
        best_s = min(expected.values())
        now_s = None if self._current is None else expected.get(self._current)
        if self._current is None or now_s is None or now_s > best_s * (1 + HYSTERESIS):
            self._current = next(mode for mode, seconds in expected.items() if seconds <= best_s * 1.01)
        trial = self._trial(expected, self._current, deadline_s)
        self._is_trial = trial is not None
        chosen = self._current if trial is None else trial
        for kind in {mode.kind for mode in expected}:
            self._unused_s[kind] = 0.0 if kind == chosen.kind else self._unused_s.get(kind, 0.0) + expected[chosen]
        return chosen

    def _expected(self) -> dict[Mode, float]:
        """Return the seconds of each mode that the next frame can have, which is one frame less of each pause."""
        paused = {kind for kind, pause in self._pauses.items() if pause.left_frames}
        for kind in paused:
            self._pauses[kind].left_frames -= 1
        modes = [mode for mode in self._modes if mode.kind not in paused]
        return {mode: seconds for mode in modes if (seconds := self.expected_s(mode)) is not None}

    def _trial(self, expected: Mapping[Mode, float], current: Mode, deadline_s: float) -> Mode | None:
        """Return the fastest mode of another kind whose time it is; None where there is none.

        That is when a frame of it takes a small share of the time that went by without one.
        """
        for mode in sorted(expected, key=expected.__getitem__):
            is_due = expected[mode] < TRIAL_SHARE * self._unused_s.get(mode.kind, 0.0)
            is_late_anyway = deadline_s < expected[current] and expected[mode] <= SERVER_MARGIN * expected[current]
            if mode.kind != current.kind and is_due and (is_late_anyway or self._may_be_tried(mode, deadline_s)):
                return mode
        return None

    def _may_be_tried(self, mode: Mode, deadline_s: float) -> bool:
        """Return whether a trial of `mode` is expected to be in time, or leaves the device time to answer instead.

        One that is expected in time must also have the patience that it needs, or it would end the connection.
        """
        seconds, own_s, local_s = self.expected_s(mode), self._device[mode.kind].value, self.expected_s(Mode(LOCAL))
        if seconds is None or own_s is None:
            return False
        if mode.kind == LOCAL or local_s is None or local_s >= deadline_s - own_s:  # the device cannot help
            return seconds <= deadline_s
        least_s = seconds if seconds <= deadline_s else own_s + LEAST_PATIENCE * deadline_s
        return least_s + LOCAL_MARGIN * local_s <= deadline_s

    def _away_s(self, mode: Mode) -> float | None:
        """Return how long the network and the server would take in `mode`; None as for `expected_s`."""
        kind = mode.kind
        parts = (self._sizes.get(mode), self._answers.get(kind), self._server.get(kind), self._s_per_byte, self._queue)
        known = [part.value for part in parts if part is not None and part.value is not None]
        if not self.has_server or len(known) < len(parts) or self.round_trip_s is None:
            return None
        size_bytes, answer_bytes, server_s, s_per_byte, queue_s = known
        return self.round_trip_s + (size_bytes + answer_bytes) * s_per_byte + queue_s + server_s
