"""How evenly a mixture's routers choose, as its runs have found: what a cache of experts is worth for this model.

Nothing in a file says it. Each run that decoded enough leaves a point: the share of all experts that could stay in
memory, and the share of look-ups that found theirs there. Without any, experts are taken to be chosen evenly, in which
case the two are equal.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path

from edge_run.tiers.gguf import GgufModel

LEAST_LOOK_UPS = 300
MOST_POINTS = 8
ALIKE = 0.02  # shares that are so near are one point, the latest

Point = tuple[float, float]
logger = logging.getLogger(__name__)


def hit_rate(points: Sequence[Point], share: float) -> float:
    """Return what share of look-ups will find their expert in memory, where `share` of all experts are.

    points: of earlier runs. Misses are taken to be a power of what is not in memory; between two points the power is
    interpolated.
    """
    if not 0 < share < 1:
        return min(1.0, max(0.0, share))
    powers = sorted((known, math.log(1 - rate) / math.log(1 - known)) for known, rate in points) or [(share, 1.0)]
    below = [point for point in powers if point[0] <= share] or powers[:1]
    above = [point for point in powers if point[0] > share] or powers[-1:]
    (x0, y0), (x1, y1) = below[-1], above[0]
    power = y0 if x1 <= x0 else y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    return float(1 - (1 - share) ** power)


def recall(gguf: GgufModel, cache_folder: Path) -> list[Point]:
    """Return what runs of `gguf` have found so far."""
    try:
        points = json.loads(_place(gguf, cache_folder).read_text())
        return [(float(share), float(rate)) for share, rate in points if 0 < share < 1 and 0 < rate < 1]
    except (OSError, ValueError, TypeError):
        return []


def remember(gguf: GgufModel, cache_folder: Path, share: float, look_ups: int, hits: int) -> None:
    """Keep what a run found, where it looked up often enough; without a folder to write to, nothing is kept."""
    if look_ups < LEAST_LOOK_UPS or not 0 < share < 1 or not 0 < hits < look_ups:
        return
    others = [point for point in recall(gguf, cache_folder) if abs(point[0] - share) > ALIKE]
    place = _place(gguf, cache_folder)
    draft = place.with_name(f"{place.name}.{os.getpid()}.part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps([*others[1 - MOST_POINTS :], (share, hits / look_ups)]))
        draft.replace(place)
    except OSError as error:
        logger.info("what was found about routing cannot be kept in %s: %s", place.parent, error)


def _place(gguf: GgufModel, cache_folder: Path) -> Path:
    import hashlib  # which takes long to load

    facts: list[object] = []
    for shard in gguf.shards:
        status = shard.path.stat()
        facts += [os.fsencode(shard.path.resolve()).hex(), status.st_size, status.st_ino, status.st_mtime_ns]
    return cache_folder / "routing" / f"{hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()}.json"
