"""What earlier runs of a mixture say about passes to come: pure, from points to seconds.

A pass computes, waits for reads, and does some things beside: it finds out what to read, moves frames, and computes
slower while others read. The run most like the one to come says how long that took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edge_run.base.profile import DiskProfile
from edge_run.runtime.planning.routing import PassSeen, Point

SLOWEST, FASTEST = 0.2, 1.5  # of the drive's bandwidth: what an earlier run may have read at
LEAST_NEW_SHARE = 0.1  # of all experts: what a first pass must have read into new memory to tell how fast that is
BATCH_SHARE = 0.5  # of what wide passes take beside, for the pass; the rest goes with the bytes it reads


class Line(NamedTuple):
    """Seconds for each pass, and for each byte that it reads."""

    pass_s: float
    byte_s: float

    def at(self, n_bytes: float) -> float:
        """Return the seconds of a pass that reads `n_bytes`."""
        return self.pass_s + self.byte_s * n_bytes


@dataclass(frozen=True, slots=True)
class Learned:
    """What was learned; None where nothing was.

    token: what single tokens take beside computing and waiting; wait_byte_s: what they wait for each byte. batch: as
    token, of full passes of a prompt. first_use_byte_s: of reading into new memory.
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
    """Return what `earlier` runs say of a run that has room for `room_bytes` of `expert_bytes`.

    compute_s: of passes of so many tokens, computing alone. token_bytes: what a token will read. Runs that this drive
    cannot have had are not believed: it may have been another then.
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
        """Split what is neither computing nor waiting; what is done with a byte takes no longer than reading it."""
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
    """Return what a byte that is read into new memory takes, as the run most like this found it."""
    slowest, fastest = SLOWEST * disk.first_use_bytes_per_s, FASTEST * disk.bytes_per_s
    for point in sorted(earlier, key=lambda point: abs(point.room_share * expert_bytes - room_bytes)):
        read_bytes, busy_s = point.first.read_bytes, point.first.busy_s
        new = min(read_bytes, point.room_share * expert_bytes)
        speed = new / max(busy_s - (read_bytes - new) / disk.bytes_per_s, 1e-9)
        if new >= LEAST_NEW_SHARE * expert_bytes and slowest < speed < fastest:
            return 1 / speed
    return None
