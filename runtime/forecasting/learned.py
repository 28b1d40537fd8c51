"""Predictions from earlier runs that were streamed by expert: points in, seconds out. Pure.

Besides computing and waiting for reads, a pass has overhead: it decides what to read, moves frames, and computes slower
while readers work. The overhead is taken from the earlier run that was most like the one to come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edge_run.base.profile import DiskProfile
from edge_run.runtime.forecasting.routing import PassSeen, Point

SLOWEST, FASTEST = 0.2, 1.5  # of the drive's bandwidth: what an earlier run may have read at
LEAST_NEW_SHARE = 0.1  # of all experts: what a first pass must have read into new memory to tell how fast that is
BATCH_SHARE = 0.5  # of a prefill batch's overhead that does not grow with the bytes it reads


class Line(NamedTuple):
    """Seconds as a line: a part for each pass, and a part for each byte that it reads."""

    pass_s: float
    byte_s: float

    def at(self, n_bytes: float) -> float:
        """Return the seconds of a pass that reads `n_bytes`."""
        return self.pass_s + self.byte_s * n_bytes


@dataclass(frozen=True, slots=True)
class Learned:
    """What was learned from earlier runs; None where nothing was.

    token: the overhead of passes of one token.
    wait_byte_s: how long these wait for each byte.
    batch: the overhead of full passes of a prompt.
    first_use_byte_s: the time of reading a byte into new memory.
    """

    token: Line | None = None
    wait_byte_s: float = 0.0
    batch: Line | None = None
    first_use_byte_s: float | None = None


def learn(
    earlier: Sequence[Point],
    disk: DiskProfile,
    compute_s: Callable[[int], float],
    token_bytes: float,
    room_bytes: float,
    expert_bytes: float,
) -> Learned:
    """Return the lessons of `earlier` runs for a run with room for `room_bytes` of `expert_bytes`.

    compute_s: the seconds that a pass of some tokens computes.
    token_bytes: the bytes that a token will read.

    Runs whose reads were far from this drive's speed are left out: the model may have been on another drive then.
    """

    def is_believed(seen: PassSeen) -> bool:
        reading_s = seen.wall_s - seen.choosing_s - compute_s(1)
        return reading_s > 0 and SLOWEST < seen.read_bytes / reading_s / disk.bytes_per_s < FASTEST

    first_use = _first_use_byte_s(earlier, disk, room_bytes, expert_bytes)
    believed = [point for point in earlier if is_believed(point.token)]
    if not believed:
        return Learned(first_use_byte_s=first_use)
    nearest = min(believed, key=lambda point: abs(point.token.read_bytes - token_bytes))

    def beside(seen: PassSeen, pass_share: float) -> Line:
        """Split the overhead; its part for a byte is at most the time of reading the byte."""
        beside_s = max(0.0, seen.wall_s - seen.wait_s - compute_s(round(seen.n_tokens)) - seen.choosing_s)
        byte_s = min((1 - pass_share) * beside_s / max(seen.read_bytes, 1), 1 / disk.bytes_per_s)
        return Line(seen.choosing_s + pass_share * beside_s, byte_s)

    return Learned(
        beside(nearest.token, 0.0),
        nearest.token.wait_s / nearest.token.read_bytes,
        beside(nearest.batch, BATCH_SHARE) if nearest.batch.n_tokens else None,
        first_use,
    )


def _first_use_byte_s(
    earlier: Sequence[Point], disk: DiskProfile, room_bytes: float, expert_bytes: float
) -> float | None:
    """Return the time of reading a byte into new memory, from the run that was most like this one."""
    slowest, fastest = SLOWEST * disk.first_use_bytes_per_s, FASTEST * disk.bytes_per_s
    for point in sorted(earlier, key=lambda point: abs(point.room_share * expert_bytes - room_bytes)):
        read_bytes, busy_s = point.first.read_bytes, point.first.busy_s
        new = min(read_bytes, point.room_share * expert_bytes)
        speed = new / max(busy_s - (read_bytes - new) / disk.bytes_per_s, 1e-9)
        if new >= LEAST_NEW_SHARE * expert_bytes and slowest < speed < fastest:
            return 1 / speed
    return None
