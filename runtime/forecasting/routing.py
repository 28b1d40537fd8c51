"""What runs of a mixture of experts have measured: the hit rate of the expert cache, and the times of passes.

How evenly routers choose experts, and so how much a cache is worth, is not in the model's file. So each run that
decoded enough tokens saves a point. Without a point, experts are taken to be chosen evenly: then the hit rate is the
share of the experts that has room.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edge_run.base.protocols import Clock
from edge_run.runtime.probing.kept_findings import KeptFindings
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.readers import Readers

if TYPE_CHECKING:
    from edge_run.tiers.kv.spill import Spill
    from edge_run.tiers.weights import WeightsOnDemand

LEAST_TOKENS = 12
MOST_POINTS = 8
MOST_SHARE = 0.9  # of its experts, that a layer uses: the next layer will want as many of its own
ALIKE = 0.02  # shares that are so near are one point, the latest
MOST_PASSES = 256
OUTLIER = 3.0  # of the median


class PassSeen(NamedTuple):
    """The mean of passes of one width.

    n_tokens: the tokens of a pass.
    read_bytes: the bytes that it read.
    wall_s: the time from one pass to the next, without waits for keys and values.
    wait_s: the part of this time in which the pass waited for reads.
    choosing_s: the part in which it decided what to read.
    busy_s: the part with a read in flight.
    """

    n_tokens: float = 0.0
    read_bytes: float = 0.0
    wall_s: float = 0.0
    wait_s: float = 0.0
    choosing_s: float = 0.0
    busy_s: float = 0.0


class Point(NamedTuple):
    """The measurements of one run.

    room_share: the share of all experts' bytes that had room.
    hit_rate: the share of a token's bytes that was in memory.
    token: passes of one token.
    first: the first pass, which reads into memory that was not used before, as far as there is room.
    batch: full passes of a prompt, if there were any.
    """

    room_share: float
    hit_rate: float
    token: PassSeen
    first: PassSeen = PassSeen()
    batch: PassSeen = PassSeen()


class Usage:
    """Measures the passes of one run.

    room_share: the share of all experts' bytes that has room.
    token_bytes: the bytes on the drive of the experts that a token uses; they may be set between passes, when another
        file is read.
    spilled: keys and values in a file, where there are any: passes wait for these too, which is no time of experts.
    """

    def __init__(
        self,
        room_share: float,
        token_bytes: int,
        weights: WeightsOnDemand,
        readers: Readers,
        clock: Clock = time.monotonic,
    ) -> None:
        """weights: the experts. readers: what reads them, and other things besides."""
        self.room_share, self.token_bytes = room_share, token_bytes
        self._weights, self._readers, self._clock = weights, readers, clock
        self.spilled: Spill | None = None
        self.n_tokens = self._read_bytes = self._used_bytes = 0
        self._tokens: deque[PassSeen] = deque(maxlen=MOST_PASSES)
        self._batches: deque[PassSeen] = deque(maxlen=MOST_PASSES)
        self._first: PassSeen | None = None
        self._began: PassSeen | None = None  # the pass that runs, with the counters as it began
        self._began_expert_bytes = 0

    def begin(self, n_tokens: int, wait_s: float, choosing_s: float) -> None:
        """Note that a pass reaches its first layer with experts; the time since the last call is the last pass's.

        n_tokens: the tokens of the new pass.
        wait_s: all waits since the start, as in `PassSeen`.
        choosing_s: all decisions since the start, as in `PassSeen`.
        """
        now_s = self._clock() - (self.spilled.wait_s if self.spilled else 0.0)
        read = self._readers.totals
        read_bytes = read.bytes_read - (self.spilled.awaited_bytes if self.spilled else 0)
        now = PassSeen(n_tokens, read_bytes, now_s, wait_s, choosing_s, read.busy_s)
        expert_bytes = self._weights.read_bytes
        if self._began is not None:
            since = (after - before for after, before in zip(now[1:], self._began[1:], strict=True))
            self._note(PassSeen(self._began.n_tokens, *since), expert_bytes - self._began_expert_bytes)
        self._began, self._began_expert_bytes = now, expert_bytes

    def _note(self, seen: PassSeen, expert_bytes: int) -> None:
        if seen.n_tokens == 1:
            self.n_tokens += 1
            self._read_bytes += expert_bytes
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
        """The share of the bytes used by tokens that was in memory; 0 where nothing was decoded.

        It is 0 too where more was read than used: what was predicted in vain, and what else lies in the chunks.
        """
        return max(0.0, 1 - self._read_bytes / self._used_bytes) if self._used_bytes else 0.0

    @property
    def point(self) -> Point | None:
        """The point to save; None where too few tokens were decoded, or nothing can be learnt from them."""
        share, rate = self.room_share, self.hit_rate
        if self.n_tokens < LEAST_TOKENS or not 0 < share < 1 or not 0 < rate < 1:
            return None
        return Point(share, rate, _mean(self._tokens), self._first or PassSeen(), _mean(self._batches))


def _mean(passes: Collection[PassSeen]) -> PassSeen:
    """Return the mean of `passes` without those that were held up, for instance by the wait for a question."""
    if not passes:
        return PassSeen()
    most_s = OUTLIER * statistics.median(seen.wall_s for seen in passes)
    usual = [seen for seen in passes if seen.wall_s <= most_s]
    return PassSeen(*map(statistics.fmean, zip(*usual, strict=True)))


def hit_rate(points: Sequence[Point], share: float) -> float:
    """Return the expected share of a token's bytes in memory, where `share` of all experts has room.

    points: the points of earlier runs. The miss rate is taken to be a power of the share that has no room; between two
        points the exponent is interpolated.
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
    """The experience of earlier runs of a model.

    points: their measurements.
    tunables: the last setting of each tunable whose settings were compared.
    """

    points: Sequence[Point] = ()
    tunables: Mapping[str, str] = field(default_factory=dict)


def recall(gguf: GgufModel, cache_folder: Path) -> Experience:
    """Return the experience of earlier runs of `gguf`."""
    return KeptFindings.of_model(cache_folder / "routing", gguf).read(_experience) or Experience()


def _experience(found: Any) -> Experience:
    points = [_point(*point) for point in found["points"]]
    points = [point for point in points if 0 < point.room_share < 1 and 0 < point.hit_rate < 1]
    return Experience(points, {str(name): str(setting) for name, setting in found["tunables"].items()})


def _point(room_share: float, hit_rate: float, *passes: Iterable[float]) -> Point:
    token, first, batch = (PassSeen(*map(float, seen)) for seen in passes)
    return Point(float(room_share), float(hit_rate), token, first, batch)


def remember(gguf: GgufModel, cache_folder: Path, usage: Usage, tunables: Mapping[str, str]) -> None:
    """Save the experience of a run that decoded enough tokens, if the folder can be written. Never raises.

    tunables: the settings of the tunables whose settings were compared.
    """
    new = usage.point
    if new is None:
        return
    known = recall(gguf, cache_folder)
    others = [point for point in known.points if abs(point.room_share - new.room_share) > ALIKE]
    found: dict[str, object] = {"points": [*others[1 - MOST_POINTS :], new], "tunables": {**known.tunables, **tunables}}
    KeptFindings.of_model(cache_folder / "routing", gguf).write(found)
