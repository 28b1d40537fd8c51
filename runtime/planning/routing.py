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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from edge_run.base.protocols import Clock
from edge_run.base.strict_json import parse
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.readers import Readers

LEAST_TOKENS = 12
MOST_POINTS = 8
ALIKE = 0.02  # shares that are so near are one point, the latest
MOST_PASSES = 256
OUTLIER = 3.0  # of the median
logger = logging.getLogger(__name__)


class PassSeen(NamedTuple):
    """What passes of one width did, in the mean: `n_tokens` tokens, `read_bytes` read.

    wall_s: from one pass to the next; of these wait_s were waited for reads, and choosing_s taken to find out what to
    read. busy_s: with a read in flight.
    """

    n_tokens: float = 0.0
    read_bytes: float = 0.0
    wall_s: float = 0.0
    wait_s: float = 0.0
    choosing_s: float = 0.0
    busy_s: float = 0.0


class Point(NamedTuple):
    """What a run found.

    room_share: of all experts' bytes, what there was room for; hit_rate: of a token's bytes, what was there. token:
    what single tokens took; batch: full passes of a prompt, if there were any; first: the first pass, which reads into
    memory that was not used before as far as there is room.
    """

    room_share: float
    hit_rate: float
    token: PassSeen
    first: PassSeen = PassSeen()
    batch: PassSeen = PassSeen()


class Usage:
    """What passes took. Single tokens use `token_bytes` of experts each, of which `room_share` of all have room.

    token_bytes: as on the drive; may be set between passes, where another file is read.
    """

    def __init__(self, room_share: float, token_bytes: int, readers: Readers, clock: Clock = time.monotonic) -> None:
        self.room_share, self.token_bytes = room_share, token_bytes
        self._readers, self._clock = readers, clock
        self.n_tokens = self._read_bytes = self._used_bytes = 0
        self._tokens: deque[PassSeen] = deque(maxlen=MOST_PASSES)
        self._batches: deque[PassSeen] = deque(maxlen=MOST_PASSES)
        self._first: PassSeen | None = None
        self._began: PassSeen | None = None  # the pass that runs, with the counters as it began

    def begin(self, n_tokens: int, wait_s: float, choosing_s: float) -> None:
        """A pass of `n_tokens` tokens comes to its first layer with experts; what was done since belongs to the last.

        wait_s and choosing_s: counted since the start, as in PassSeen.
        """
        read = self._readers.totals
        now = PassSeen(n_tokens, read.bytes_read, self._clock(), wait_s, choosing_s, read.busy_s)
        if self._began is not None:
            since = (after - before for after, before in zip(now[1:], self._began[1:], strict=True))
            self._note(PassSeen(self._began.n_tokens, *since))
        self._began = now

    def _note(self, seen: PassSeen) -> None:
        if seen.n_tokens == 1:
            self.n_tokens += 1
            self._read_bytes += int(seen.read_bytes)
            self._used_bytes += self.token_bytes
            self._tokens.append(seen)
        elif self._first is not None and (not self._batches or seen.n_tokens >= self._batches[0].n_tokens):
            if self._batches and seen.n_tokens > self._batches[0].n_tokens:
                self._batches.clear()
            self._batches.append(seen)
        if self._first is None:
            self._first = seen

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
        return Point(share, rate, _mean(self._tokens), self._first or PassSeen(), _mean(self._batches))


def _mean(passes: Collection[PassSeen]) -> PassSeen:
    """Return the mean of `passes`, without those that something else held up, such as the wait for a question."""
    if not passes:
        return PassSeen()
    most_s = OUTLIER * statistics.median(seen.wall_s for seen in passes)
    usual = [seen for seen in passes if seen.wall_s <= most_s]
    return PassSeen(*map(statistics.fmean, zip(*usual, strict=True)))


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
    """What runs of a mixture have found. tunables: what each was set to last, where that was compared with others."""

    points: Sequence[Point] = ()
    tunables: Mapping[str, str] = field(default_factory=dict)


def recall(gguf: GgufModel, cache_folder: Path) -> Experience:
    """Return what runs of `gguf` have found so far."""
    try:
        found = parse(place_of(gguf, cache_folder / "routing").read_bytes())
        points = [_point(*point) for point in found["points"]]
        points = [point for point in points if 0 < point.room_share < 1 and 0 < point.hit_rate < 1]
        return Experience(points, {str(name): str(setting) for name, setting in found["tunables"].items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Experience()


def _point(room_share: float, hit_rate: float, *passes: Iterable[float]) -> Point:
    token, first, batch = (PassSeen(*map(float, seen)) for seen in passes)
    return Point(float(room_share), float(hit_rate), token, first, batch)


def remember(gguf: GgufModel, cache_folder: Path, usage: Usage, tunables: Mapping[str, str]) -> None:
    """Keep what a run found, where it decoded enough; without a folder to write to, nothing is kept. Never raises.

    tunables: those of which settings were compared.
    """
    new = usage.point
    if new is None:
        return
    known = recall(gguf, cache_folder)
    others = [point for point in known.points if abs(point.room_share - new.room_share) > ALIKE]
    found: dict[str, object] = {"points": [*others[1 - MOST_POINTS :], new], "tunables": {**known.tunables, **tunables}}
    keep(gguf, cache_folder / "routing", found)


def keep(gguf: GgufModel, folder: Path, found: object) -> None:
    """Keep what was found about a model in a folder of the cache, as JSON; nothing where it cannot be written."""
    try:
        place = place_of(gguf, folder)
        draft = place.with_name(f"{place.name}.{os.getpid()}.part")
        place.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(found))
        draft.replace(place)
    except OSError as error:  # also where the model file is gone by now
        logger.info("what was found about the model cannot be kept in %s: %s", folder, error)


def place_of(gguf: GgufModel, folder: Path) -> Path:
    """Return the file in a folder of the cache that is about a model, which is another one when its files change."""
    import hashlib  # which takes long to load

    facts: list[object] = []
    for shard in gguf.shards:
        status = shard.path.stat()
        facts += [os.fsencode(shard.path.resolve()).hex(), status.st_size, status.st_ino, status.st_mtime_ns]
    return folder / f"{hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()}.json"
