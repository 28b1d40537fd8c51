"""What runs of a mixture have found: how evenly its routers choose, so what a cache of experts is worth, and its speed.

Nothing in a file says it. Each run that decoded enough leaves a point. Without any, experts are taken to be chosen
evenly: then as much of what a token uses is in memory as there is room for.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from edge_run.base.protocols import Clock
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.readers import Readers, ReadTotals

LEAST_TOKENS = 12
MOST_POINTS = 8
ALIKE = 0.02  # shares that are so near are one point, the latest

MOST_TIMES = 256
logger = logging.getLogger(__name__)


class Point(NamedTuple):
    """What a run found.

    room_share: of all experts' bytes, what there was room for; hit_rate: of a token's bytes, what was there.
    token_bytes: what a token read; token_s: how long it took, in the median. first_bytes, first_s: what the first pass
    read, into memory that was not used before as far as there was room, and how long it did.
    """

    room_share: float
    hit_rate: float
    token_bytes: float
    token_s: float
    first_bytes: float = 0.0
    first_s: float = 0.0


class Usage:
    """What single tokens read, of the `token_bytes` of experts that each uses, where `room_share` has room.

    token_bytes: as on the drive; may be set between passes, where another file is read.
    """

    def __init__(self, room_share: float, token_bytes: int, readers: Readers, clock: Clock = time.monotonic) -> None:
        self.room_share = room_share
        self._clock, self._began_s = clock, 0.0
        self._times: deque[float] = deque(maxlen=MOST_TIMES)
        self.n_tokens = 0
        self.token_bytes, self._readers = token_bytes, readers
        self._read_bytes = self._used_bytes = 0
        self._is_token = False
        self._mark: ReadTotals | None = None
        self._first = ReadTotals()

    def begin(self, *, is_token: bool) -> None:
        """A pass comes to its first layer with experts; what was read since the last one did was for that one."""
        totals, now_s = self._readers.totals, self._clock()
        read = totals.since(self._mark or totals)
        if self._mark and not self._first.bytes_read:
            self._first = read
        if self._is_token:
            self.n_tokens += 1
            self._read_bytes += read.bytes_read
            self._used_bytes += self.token_bytes
            self._times.append(now_s - self._began_s)
        self._is_token, self._mark, self._began_s = is_token, totals, now_s

    @property
    def hit_rate(self) -> float:
        """The share of what tokens used that was in memory; 0 where nothing was decoded."""
        return 1 - self._read_bytes / self._used_bytes if self.n_tokens else 0.0

    @property
    def point(self) -> Point | None:
        """What there is to remember; None where too little was decoded, or nothing can be learnt from it."""
        share, rate = self.room_share, self.hit_rate
        if self.n_tokens < LEAST_TOKENS or not 0 < share < 1 or not 0 < rate < 1:
            return None
        token_bytes, first = self._read_bytes / self.n_tokens, self._first
        return Point(share, rate, token_bytes, statistics.median(self._times), first.bytes_read, first.busy_s)


def hit_rate(points: Sequence[Point], share: float) -> float:
    """Return what share of a token's bytes will be in memory, where there is room for `share` of all experts.

    points: of earlier runs. Misses are taken to be a power of what is not in memory; between two points the power is
    interpolated.
    """
    if not 0 < share < 1:
        return min(1.0, max(0.0, share))
    powers = sorted((known, math.log(1 - rate) / math.log(1 - known)) for known, rate, *_ in points) or [(share, 1.0)]
    below = [point for point in powers if point[0] <= share] or powers[:1]
    above = [point for point in powers if point[0] > share] or powers[-1:]
    (x0, y0), (x1, y1) = below[-1], above[0]
    power = y0 if x1 <= x0 else y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    return float(1 - (1 - share) ** power)


@dataclass(frozen=True, slots=True)
class Experience:
    """What runs of a mixture have found. levers: what each was set to last, where that was compared with others."""

    points: Sequence[Point] = ()
    levers: Mapping[str, str] = field(default_factory=dict)


def recall(gguf: GgufModel, cache_folder: Path) -> Experience:
    """Return what runs of `gguf` have found so far."""
    try:
        found = json.loads(_place(gguf, cache_folder).read_text())
        points = [Point(*map(float, point)) for point in found["points"]]
        points = [point for point in points if 0 < point.room_share < 1 and 0 < point.hit_rate < 1]
        return Experience(points, {str(name): str(setting) for name, setting in found["levers"].items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Experience()


def remember(gguf: GgufModel, cache_folder: Path, usage: Usage, levers: Mapping[str, str]) -> None:
    """Keep what a run found, where it decoded enough; without a folder to write to, nothing is kept. Never raises.

    levers: those of which settings were compared.
    """
    new = usage.point
    if new is None:
        return
    known = recall(gguf, cache_folder)
    others = [point for point in known.points if abs(point.room_share - new.room_share) > ALIKE]
    try:
        place = _place(gguf, cache_folder)
        draft = place.with_name(f"{place.name}.{os.getpid()}.part")
        place.parent.mkdir(parents=True, exist_ok=True)
        found = {"points": [*others[1 - MOST_POINTS :], new], "levers": {**known.levers, **levers}}
        draft.write_text(json.dumps(found))
        draft.replace(place)
    except OSError as error:  # also where the model file is gone by now
        logger.info("what was found about routing cannot be kept in %s: %s", cache_folder, error)


def _place(gguf: GgufModel, cache_folder: Path) -> Path:
    import hashlib  # which takes long to load

    facts: list[object] = []
    for shard in gguf.shards:
        status = shard.path.stat()
        facts += [os.fsencode(shard.path.resolve()).hex(), status.st_size, status.st_ino, status.st_mtime_ns]
    return cache_folder / "routing" / f"{hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()}.json"
