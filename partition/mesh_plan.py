"""Which device computes which layers: pure, from what was measured of each, the plan that takes least time per token.

The devices form a ring that a token goes around `rounds` times; in each round a device computes some consecutive units
(a unit is as a rule a layer). What does not fit its memory it streams, and all of them at once: while others compute,
its readers run ahead, as far as its window reaches. So a device with bytes S to stream, at D bytes a second, a window w
and R rounds is at work for max(compute + what reading and stopping take of it, (S - R w) / D), and a token takes

    max( sum of what each is at work + hops,  max over devices of S / D )

The window is what lacks a place, divided by R - 1, where that is less (`partition/turns.py`): then w is all that
streams of a turn.

Rounds (prima.cpp, Li et al. 2025, "Prioritizing ring assignment") shorten the first term where devices stream, and cost
hops. What a hop costs is taken to be each device's own: its way to a common switch or access point, so that the order
in the ring does not matter, the search over counts is exact (dynamic programming under a bound on S / D), and a device
that slows the rest is left out. With units of unequal size the counts are found for their mean, and the limits of the
ranges then moved as long as that helps.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

ROUNDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
READ_CPU_S_PER_BYTE = 8e-11  # what readers take from computing; so that nothing streams that need not
STOPS_S_PER_BYTE = 7e-12  # of weights that are waited for stretch by stretch, as those of a turn at once are not
READ_SHARE = 0.93  # of a drive's speed, which reading for one turn after the other comes to
MOST_TRIED = 2_000  # units, in all ways to share out so few blocks
_NEVER = math.inf


@dataclass(frozen=True, slots=True)
class UnitWork:
    """One unit: bytes of weights, and bytes that are kept for it between tokens.

    used_bytes: of the weights, what a token needs: in a mixture not all; None where it is.
    """

    weight_bytes: int
    kept_bytes: int = 0
    used_bytes: int | None = None

    @property
    def token_bytes(self) -> int:
        """The weights that a token needs."""
        return self.weight_bytes if self.used_bytes is None else self.used_bytes

    def plus(self, other: UnitWork) -> UnitWork:
        """Return both together."""
        weights, kept = self.weight_bytes + other.weight_bytes, self.kept_bytes + other.kept_bytes
        return UnitWork(weights, kept, self.token_bytes + other.token_bytes)


@dataclass(frozen=True, slots=True)
class Station:
    """A device as the planner sees it.

    memory_bytes: for weights and what is kept, all else taken off. compute_bytes_per_s: weights it computes with per
    second when they are in memory. window_bytes: of memory_bytes, what streaming runs ahead through. hop_s: what a
    state spends on its way to it or from it, both together, and in being taken and handed on. most_weight_bytes: of
    weights that it may have at all, None for any number.
    """

    node: str
    memory_bytes: int
    compute_bytes_per_s: float
    disk_bytes_per_s: float
    hop_s: float = 0.0
    window_bytes: int = 0
    most_weight_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """owners: of each unit, head and tail included, the node that computes it. token_s: predicted."""

    owners: tuple[str, ...]
    rounds: int
    token_s: float
    read_bytes: dict[str, int]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Who takes part, in the order of the ring."""
        return tuple(dict.fromkeys(self.owners))

    @property
    def tokens_per_s(self) -> float:
        """Predicted."""
        return 1 / self.token_s


def plan_mesh(units: Sequence[UnitWork], stations: Sequence[Station], among: Sequence[int] = ROUNDS) -> MeshPlan | None:
    """Return the fastest plan; the first station has the head and the tail, which are the first and the last unit.

    among: numbers of rounds to try. None when the model does not fit all of them together: each needs room for its
    window and what is kept.
    """
    plans = [
        plan for rounds in _useful_rounds(units, stations, among) if (plan := _plan_rounds(units, stations, rounds))
    ]
    alone = token_time(units, stations, (stations[0].node,) * len(units))
    if alone < _NEVER:
        plans.append(_made(units, stations, (stations[0].node,) * len(units), alone))
    if not plans:
        return None
    best = min(plans, key=lambda plan: (plan.token_s, plan.rounds))
    return _improved(units, stations, best) if len({unit.weight_bytes for unit in units[1:-1]}) > 1 else best


def token_time(units: Sequence[UnitWork], stations: Sequence[Station], owners: Sequence[str]) -> float:
    """Return the seconds that a token takes when `owners` compute the units; infinite where one has no room."""
    works = {station.node: UnitWork(0) for station in stations}
    for unit, owner in zip(units, owners, strict=True):
        works[owner] = works[owner].plus(unit)
    turns, first = _turns(owners), stations[0].node
    is_alone = set(owners) == {first}
    at_work = reading = 0.0
    for station in stations:
        if works[station.node].weight_bytes or works[station.node].kept_bytes:
            rounds = turns[station.node]
            streamed = _streamed_bytes(station, works[station.node], rounds)
            at_work += _at_work_s(station, works[station.node], streamed, rounds)
            at_work += 0.0 if is_alone else rounds * station.hop_s
            reading = max(reading, _read_s(station, streamed))
    return max(at_work, reading)


def _turns(owners: Sequence[str]) -> Counter[str]:
    """Return how often each node has its turn in a token; the tail goes on where the next token's head begins."""
    turns = Counter(owner for i, owner in enumerate(owners) if i == 0 or owners[i - 1] != owner)
    turns[owners[0]] -= owners[-1] == owners[0] and turns[owners[0]] > 1
    return turns


def _window_bytes(station: Station, work: UnitWork, rounds: int) -> float:
    """Return what of a device's memory weights stream through."""
    lacking = work.weight_bytes - (station.memory_bytes - work.kept_bytes)
    if rounds < 2 or work.used_bytes not in (None, work.weight_bytes):
        return station.window_bytes
    return min(station.window_bytes, max(lacking, 0) / (rounds - 1))


def _streamed_bytes(station: Station, work: UnitWork, rounds: int) -> float:
    """Return the bytes that are read for every token; infinite where there is no room to do so."""
    if station.most_weight_bytes is not None and work.weight_bytes > station.most_weight_bytes:
        return _NEVER
    room = station.memory_bytes - work.kept_bytes
    if work.weight_bytes <= room:
        return 0.0
    if room < station.window_bytes:
        return _NEVER
    return work.token_bytes * (1 - (room - _window_bytes(station, work, rounds)) / work.weight_bytes)


def _read_s(station: Station, streamed_bytes: float) -> float:
    return streamed_bytes / (READ_SHARE * station.disk_bytes_per_s) if streamed_bytes else 0.0


def _at_work_s(station: Station, work: UnitWork, streamed_bytes: float, rounds: int) -> float:
    if not streamed_bytes:
        return work.token_bytes / station.compute_bytes_per_s
    window_bytes = _window_bytes(station, work, rounds)
    behind = _read_s(station, max(0.0, streamed_bytes - rounds * window_bytes))
    stops = work.token_bytes * STOPS_S_PER_BYTE if window_bytes == station.window_bytes else 0.0
    reading = streamed_bytes * READ_CPU_S_PER_BYTE
    return max(work.token_bytes / station.compute_bytes_per_s + reading + stops, behind)


def _together(units: Sequence[UnitWork]) -> UnitWork:
    return functools.reduce(UnitWork.plus, units, UnitWork(0))


def _useful_rounds(units: Sequence[UnitWork], stations: Sequence[Station], among: Sequence[int]) -> list[int]:
    """Return the numbers of rounds to try: no more than there are blocks."""
    n_blocks = len(units) - 2
    if len(stations) < 2 or n_blocks < 1:
        return []
    return [rounds for rounds in among if rounds <= n_blocks]


def _plan_rounds(units: Sequence[UnitWork], stations: Sequence[Station], rounds: int) -> MeshPlan | None:
    """Return the best plan of so many rounds.

    Turns of a device run together where nobody has one in between, which the search does not see: so few blocks that
    all ways to share them out can be tried are shared out in all ways.
    """
    n_blocks, n_others = len(units) - 2, len(stations) - 1
    if math.comb(n_blocks + n_others, n_others) * len(units) <= MOST_TRIED:
        ways = _all_counts(n_blocks, len(stations))
    else:
        found = _best_counts(units, stations, rounds)
        ways = iter([found] if found else [])
    plans = [_dealt(stations, counts, rounds) for counts in ways]
    if not plans:
        return None
    token_s, owners = min(((token_time(units, stations, owners), owners) for owners in plans), key=itemgetter(0))
    return _made(units, stations, owners, token_s, rounds) if token_s < _NEVER else None


def _all_counts(n_blocks: int, n_stations: int) -> Iterator[list[int]]:
    """Yield all ways to share out `n_blocks`, as numbers for each station."""
    for bars in itertools.combinations(range(n_blocks + n_stations - 1), n_stations - 1):
        borders = (-1, *bars, n_blocks + n_stations - 1)
        yield [right - left - 1 for left, right in itertools.pairwise(borders)]


def _made(
    units: Sequence[UnitWork], stations: Sequence[Station], owners: Sequence[str], token_s: float, rounds: int = 1
) -> MeshPlan:
    read_bytes, turns = {}, _turns(owners)
    for station in stations:
        own = [unit for unit, owner in zip(units, owners, strict=True) if owner == station.node]
        if own:
            work = _together(own)
            streamed = _streamed_bytes(station, work, turns[station.node])
            read_bytes[station.node] = math.ceil(streamed) if streamed < _NEVER else work.weight_bytes
    return MeshPlan(tuple(owners), rounds, token_s, read_bytes)


def _best_counts(units: Sequence[UnitWork], stations: Sequence[Station], rounds: int) -> list[int] | None:
    """Return how many blocks each station gets: the least of the longer of chain and reading, over all counts."""
    import numpy as np

    n = len(units) - 2
    blocks, ends = _together(units[1:-1]), _together((units[0], units[-1]))
    shares = [_share(blocks, count, n) for count in range(n + 1)]
    chain, reading = np.full((len(stations), n + 1), _NEVER), np.zeros((len(stations), n + 1))
    for s, station in enumerate(stations):
        for count, work in enumerate(shares):
            chain[s, count], reading[s, count] = _costs(work if s else ends.plus(work), station, count, rounds, s == 0)
    bounds = np.unique(reading[np.isfinite(reading)])
    low, high = 0, len(bounds) - 1
    best: tuple[float, list[int]] | None = None
    while low <= high:
        middle = (low + high) // 2
        found = _shortest_chain(np.where(reading <= bounds[middle], chain, _NEVER))
        if found is not None:
            length, counts = found
            slowest = max(reading[s, count] for s, count in enumerate(counts))
            if best is None or max(length, slowest) < best[0]:
                best = max(length, slowest), counts
        if found is not None and found[0] <= bounds[middle]:
            high = middle - 1
        else:
            low = middle + 1
    return best[1] if best else None


def _share(blocks: UnitWork, count: int, n_blocks: int) -> UnitWork:
    """Return `count` blocks of mean size."""
    sizes = (blocks.weight_bytes, blocks.kept_bytes, blocks.token_bytes)
    return UnitWork(*(-(-size * count // n_blocks) for size in sizes))


def _costs(work: UnitWork, station: Station, count: int, rounds: int, is_first: bool) -> tuple[float, float]:
    """Return the seconds at work, hops included, and of reading, with `count` blocks, `work` in all."""
    if not count and not is_first:
        return 0.0, 0.0
    taken = min(rounds, count) + (is_first and count < rounds)  # the head and the tail may be a turn of their own
    streamed = _streamed_bytes(station, work, taken)
    return _at_work_s(station, work, streamed, taken) + taken * station.hop_s, _read_s(station, streamed)


def _shortest_chain(cost: object) -> tuple[float, list[int]] | None:
    """Return the least sum of one entry of each row whose columns add up to the last one, and those columns."""
    import numpy as np

    table = np.asarray(cost)
    n = table.shape[1] - 1
    total, chosen = table[0], [np.arange(n + 1)]
    index = np.subtract.outer(np.arange(n + 1), np.arange(n + 1))  # columns left for the rows before
    for row in table[1:]:
        sums = np.where(index >= 0, total[np.maximum(index, 0)] + row[None, :], _NEVER)
        chosen.append(sums.argmin(axis=1))
        total = sums.min(axis=1)
    if not np.isfinite(total[n]):
        return None
    counts, left = [], n
    for choice in reversed(chosen[1:]):
        counts.append(int(choice[left]))
        left -= counts[-1]
    return float(total[n]), [left, *reversed(counts)]


def _dealt(stations: Sequence[Station], counts: Sequence[int], rounds: int) -> tuple[str, ...]:
    """Return the owners when each station's blocks are spread evenly over the rounds."""
    owners = [stations[0].node]
    for r in range(rounds):
        for station, count in zip(stations, counts, strict=True):
            owners += [station.node] * ((r + 1) * count // rounds - r * count // rounds)
    return (*owners, stations[0].node)


def _improved(units: Sequence[UnitWork], stations: Sequence[Station], plan: MeshPlan) -> MeshPlan:
    """Return `plan` with the limits of its ranges moved by single units as long as that makes a token shorter."""
    owners, token_s = list(plan.owners), plan.token_s
    for _ in range(len(units)):
        before = token_s
        for limit in [u for u in range(2, len(units) - 1) if owners[u] != owners[u - 1]]:
            for moved, owner in ((limit, owners[limit - 1]), (limit - 1, owners[limit])):
                tried = [*owners[:moved], owner, *owners[moved + 1 :]]
                if (seconds := token_time(units, stations, tried)) < token_s * (1 - 1e-9):
                    owners, token_s = tried, seconds
                    break
        if token_s == before:
            break
    return replace(_made(units, stations, owners, token_s), rounds=plan.rounds)
