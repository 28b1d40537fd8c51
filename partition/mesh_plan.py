"""Which device computes which layers: the plan with the least time per token, from measurements of each device. Pure.

The devices form a ring that a token goes around `rounds` times; in each round a device computes some consecutive units
(a unit is as a rule a layer). What does not fit its memory it streams, and all of them at once: while others compute,
its readers run ahead, as far as its window reaches. So a device with bytes S to stream, at D bytes a second, a window w
and R rounds is at work for max(compute + what reading and stopping take of it, (S - R w) / D), and a token takes

    max( sum of what each is at work + hops,  max over devices of S / D )

Where a smaller window holds all that streams in one stage visit (`partition/stage_visits.py`), w is that: the bytes
without a place in memory, divided by R - 1.

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
from typing import Any, NamedTuple

from edge_run.partition.plan import MOST_RUNS

ROUNDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
READ_CPU_S_PER_BYTE = 8e-11  # what readers take from computing; so that nothing streams that need not
STOPS_S_PER_BYTE = 7e-12  # of weights that are waited for segment by segment; those of a whole stage visit are not
READ_SHARE = 0.93  # of a drive's speed, which reading for one stage visit after the other reaches
MOST_TRIED = 2_000  # units, in all ways to share out so few blocks
_NEVER = math.inf


@dataclass(frozen=True, slots=True)
class UnitWork:
    """One unit: bytes of weights, and bytes that are kept for it between tokens.

    used_bytes: the weights that a token needs, where these are not all, as in a mixture of experts; else None.
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
class DeviceSpec:
    """A device as the planner sees it.

    memory_bytes: for weights and what is kept, all else taken off. compute_bytes_per_s: weights it computes with per
    second when they are in memory. window_bytes: of memory_bytes, what streaming runs ahead through; pair_bytes: what
    it holds besides where all weights stream, two tensors, the one in use and the next; in proportion where few do.
    range_bytes: what each range of units takes besides: weights come in chunks, and at its ends lie other units' too.
    least_kept_bytes: where keys and values may be in a file, what of them is in memory at once at least, however many
        units it has; 0: all that is kept is in memory. least_kept_share: besides, of all that is kept, what stays.
    hop_s: what an activation spends on its way to it or from it, both together, and in being taken and handed on.
    most_weight_bytes: of weights that it may have at all, None for any number.
    """

    node: str
    memory_bytes: int
    compute_bytes_per_s: float
    disk_bytes_per_s: float
    hop_s: float = 0.0
    window_bytes: int = 0
    pair_bytes: int = 0
    range_bytes: int = 0
    most_weight_bytes: int | None = None
    least_kept_bytes: int = 0
    least_kept_share: float = 0.0

    def kept_in(self, work: UnitWork, rounds: int) -> int:
        """Return what of `work` is kept in memory: all, or where that leaves no window, what there is room for."""
        if not self.least_kept_bytes or self.memory_bytes - work.kept_bytes >= self.window_bytes:
            return work.kept_bytes
        room = self.memory_bytes - self.window_bytes - self.pair_bytes - rounds * self.range_bytes
        least = self.least_kept_bytes + math.ceil(self.least_kept_share * work.kept_bytes)
        return min(work.kept_bytes, max(least, room))


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """owners: of each unit, head and tail included, the node that computes it. token_s: predicted, of one answer alone.

    read_bytes: the weights that each reads for a token.
    has_away: whether keys and values are in files when the context is full, whose reading `token_s` counts.
    most_in_flight: how many groups of sequences the devices compute at the same time; 1: they take turns.
    many_s: predicted, of a token of each sequence, where several groups are in flight.
    """

    owners: tuple[str, ...]
    rounds: int
    token_s: float
    read_bytes: dict[str, int]
    most_in_flight: int = 1
    many_s: float = 0.0
    has_away: bool = False

    @property
    def nodes(self) -> tuple[str, ...]:
        """Who takes part, in the order of the ring."""
        return tuple(dict.fromkeys(self.owners))

    @property
    def tokens_per_s(self) -> float:
        """Predicted."""
        return 1 / self.token_s


def plan_mesh(units: Sequence[UnitWork], specs: Sequence[DeviceSpec], among: Sequence[int] = ROUNDS) -> MeshPlan | None:
    """Return the fastest plan; the first device has the head and the tail, which are the first and the last unit.

    among: numbers of rounds to try. None when the model does not fit all of them together: each needs room for its
    window and what is kept.
    """
    useful = [rounds for rounds in among if rounds <= len(units) - 2 and len(specs) > 1]
    plans = [plan for rounds in useful if (plan := _plan_rounds(units, specs, rounds))]
    alone = token_time(units, specs, (specs[0].node,) * len(units))
    if alone < _NEVER:
        plans.append(_made(units, specs, (specs[0].node,) * len(units), alone))
    if not plans:
        return None
    best = min(plans, key=lambda plan: (plan.token_s, plan.rounds))
    return _improved(units, specs, best) if len({unit.weight_bytes for unit in units[1:-1]}) > 1 else best


def token_time(units: Sequence[UnitWork], specs: Sequence[DeviceSpec], owners: Sequence[str]) -> float:
    """Return the seconds that a token takes when `owners` compute the units; infinite where one has no room."""
    works = {spec.node: UnitWork(0) for spec in specs}
    for unit, owner in zip(units, owners, strict=True):
        works[owner] = works[owner].plus(unit)
    visits, first = _visits(owners), specs[0].node
    is_alone = set(owners) == {first}
    at_work = reading = 0.0
    for spec in specs:
        if works[spec.node].weight_bytes or works[spec.node].kept_bytes:
            rounds = visits[spec.node]
            streaming = _streaming(spec, works[spec.node], rounds)
            at_work += _at_work_s(spec, works[spec.node], streaming, rounds)
            at_work += 0.0 if is_alone else rounds * spec.hop_s
            reading = max(reading, _read_s(spec, streaming.streamed_bytes))
    return max(at_work, reading)


def _visits(owners: Sequence[str]) -> Counter[str]:
    """Return the stage visits of each node in a token; the tail and the next token's head are one visit."""
    visits = Counter(owner for i, owner in enumerate(owners) if i == 0 or owners[i - 1] != owner)
    visits[owners[0]] -= owners[-1] == owners[0] and visits[owners[0]] > 1
    return visits


class _Streaming(NamedTuple):
    """What a device reads for every token, through which window, and the seconds that it stops for it.

    away_bytes: of it, keys and values of a full context.
    """

    streamed_bytes: float
    window_bytes: float = 0.0
    stops_s: float = 0.0
    away_bytes: int = 0


_NO_ROOM = _Streaming(_NEVER)


def _streaming(spec: DeviceSpec, work: UnitWork, rounds: int) -> _Streaming:
    """Return how a device streams `work` in `rounds` stage visits; infinite bytes where its memory is too small."""
    if spec.most_weight_bytes is not None and work.weight_bytes > spec.most_weight_bytes:
        return _NO_ROOM
    kept_bytes = spec.kept_in(work, rounds)
    room, away_bytes = spec.memory_bytes - kept_bytes, work.kept_bytes - kept_bytes
    lacking = work.weight_bytes + rounds * spec.range_bytes - room
    if lacking <= 0:
        return _Streaming(away_bytes, away_bytes=away_bytes)
    if room < spec.window_bytes:
        return _NO_ROOM
    token_bytes, window, stops_s = work.token_bytes, float(spec.window_bytes), 0.0
    if token_bytes == work.weight_bytes:
        window += 2 * work.weight_bytes / MOST_RUNS  # a read in flight and the next: long ones where there is much
        window = min(room, window + spec.pair_bytes * min(1.0, lacking / work.weight_bytes))
    if token_bytes == work.weight_bytes and rounds > 1 and lacking / (rounds - 1) < window:
        window = lacking / (rounds - 1)
    else:
        stops_s = token_bytes * STOPS_S_PER_BYTE
    weights_bytes = token_bytes * (lacking + window) / work.weight_bytes
    return _Streaming(weights_bytes + away_bytes, window, stops_s, away_bytes)


def _read_s(spec: DeviceSpec, streamed_bytes: float) -> float:
    return streamed_bytes / (READ_SHARE * spec.disk_bytes_per_s) if streamed_bytes else 0.0


def _at_work_s(spec: DeviceSpec, work: UnitWork, streaming: _Streaming, rounds: int) -> float:
    streamed_bytes, window_bytes, stops_s, _ = streaming
    compute_s = work.token_bytes / spec.compute_bytes_per_s
    if not streamed_bytes:
        return compute_s
    behind = _read_s(spec, max(0.0, streamed_bytes - rounds * window_bytes))
    return max(compute_s + streamed_bytes * READ_CPU_S_PER_BYTE + stops_s, behind)


def _together(units: Sequence[UnitWork]) -> UnitWork:
    return functools.reduce(UnitWork.plus, units, UnitWork(0))


def _plan_rounds(units: Sequence[UnitWork], specs: Sequence[DeviceSpec], rounds: int) -> MeshPlan | None:
    """Return the best plan of so many rounds.

    Two stage visits of a device become one where no other device has one in between, which the search does not see.
    So where there are few blocks, all ways to share them out are tried.
    """
    n_blocks, n_others = len(units) - 2, len(specs) - 1
    if math.comb(n_blocks + n_others, n_others) * len(units) <= MOST_TRIED:
        ways = _all_counts(n_blocks, len(specs))
    else:
        found = _best_counts(units, specs, rounds)
        ways = iter([found] if found else [])
    plans = [_dealt(specs, counts, rounds) for counts in ways]
    if not plans:
        return None
    token_s, owners = min(((token_time(units, specs, owners), owners) for owners in plans), key=itemgetter(0))
    return _made(units, specs, owners, token_s, rounds) if token_s < _NEVER else None


def _all_counts(n_blocks: int, n_devices: int) -> Iterator[list[int]]:
    """Yield all ways to share out `n_blocks`, as numbers for each device."""
    for bars in itertools.combinations(range(n_blocks + n_devices - 1), n_devices - 1):
        borders = (-1, *bars, n_blocks + n_devices - 1)
        yield [right - left - 1 for left, right in itertools.pairwise(borders)]


def _made(
    units: Sequence[UnitWork], specs: Sequence[DeviceSpec], owners: Sequence[str], token_s: float, rounds: int = 1
) -> MeshPlan:
    read_bytes, visits, has_away = dict[str, int](), _visits(owners), False
    for spec in specs:
        own = [unit for unit, owner in zip(units, owners, strict=True) if owner == spec.node]
        if own:
            work = _together(own)
            streaming = _streaming(spec, work, visits[spec.node])
            weights, has_away = streaming.streamed_bytes - streaming.away_bytes, has_away or streaming.away_bytes > 0
            read_bytes[spec.node] = math.ceil(weights) if weights < _NEVER else work.weight_bytes
    return MeshPlan(tuple(owners), rounds, token_s, read_bytes, has_away=has_away)


def _best_counts(units: Sequence[UnitWork], specs: Sequence[DeviceSpec], rounds: int) -> list[int] | None:
    """Return how many blocks each device gets: the least of the longer of chain and reading, over all counts."""
    import numpy as np

    n = len(units) - 2
    blocks, ends = _together(units[1:-1]), _together((units[0], units[-1]))
    costs = [_costs(replace(spec, hop_s=0.0), blocks, None if s else ends, n, rounds) for s, spec in enumerate(specs)]
    chain = np.stack([at_work + visits * s.hop_s for s, (at_work, visits, _) in zip(specs, costs, strict=True)])
    reading = np.stack([seconds for _, _, seconds in costs])
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


@functools.lru_cache(maxsize=1024)  # the same for all rings that a device may be in, but for the hops
def _costs(spec: DeviceSpec, blocks: UnitWork, ends: UnitWork | None, n_blocks: int, rounds: int) -> Sequence[Any]:
    """Return three arrays by the number of `blocks` that a device has: seconds at work, stage visits, seconds reading.

    ends: the head and the tail, which the first device has too.
    """
    import numpy as np

    at_work, visits, reading = (np.zeros(n_blocks + 1) for _ in range(3))
    for count in range(0 if ends else 1, n_blocks + 1):
        share = _share(blocks, count, n_blocks)
        work = ends.plus(share) if ends else share
        taken = min(rounds, count) + (ends is not None and count < rounds)  # the ends may be a stage visit of their own
        streaming = _streaming(spec, work, taken)
        at_work[count] = _at_work_s(spec, work, streaming, taken)
        visits[count], reading[count] = taken, _read_s(spec, streaming.streamed_bytes)
    return at_work, visits, reading


def _shortest_chain(cost: object) -> tuple[float, list[int]] | None:
    """Return the least sum of one entry of each row whose columns add up to the last one, and those columns."""
    import numpy as np

    table = np.asarray(cost)
    n = table.shape[1] - 1
    total, chosen = table[0], [np.arange(n + 1)]
    left_before = np.subtract.outer(np.arange(n + 1), np.arange(n + 1))  # columns for the rows before
    never = np.full(n, _NEVER)  # at the end, from where columns below 0 are counted
    for row in table[1:]:
        sums = np.concatenate((total, never))[left_before] + row
        choice = sums.argmin(axis=1)
        chosen.append(choice)
        total = sums[np.arange(n + 1), choice]
    if not np.isfinite(total[n]):
        return None
    counts, left = [], n
    for choice in reversed(chosen[1:]):
        counts.append(int(choice[left]))
        left -= counts[-1]
    return float(total[n]), [left, *reversed(counts)]


def _dealt(specs: Sequence[DeviceSpec], counts: Sequence[int], rounds: int) -> tuple[str, ...]:
    """Return the owners when each device's blocks are spread evenly over the rounds."""
    owners = [specs[0].node]
    for r in range(rounds):
        for spec, count in zip(specs, counts, strict=True):
            owners += [spec.node] * ((r + 1) * count // rounds - r * count // rounds)
    return (*owners, specs[0].node)


def _improved(units: Sequence[UnitWork], specs: Sequence[DeviceSpec], plan: MeshPlan) -> MeshPlan:
    """Return `plan` with the limits of its ranges moved by single units as long as that makes a token shorter."""
    owners, token_s = list(plan.owners), plan.token_s
    for _ in range(len(units)):
        before = token_s
        for limit in [u for u in range(2, len(units) - 1) if owners[u] != owners[u - 1]]:
            for moved, owner in ((limit, owners[limit - 1]), (limit - 1, owners[limit])):
                tried = [*owners[:moved], owner, *owners[moved + 1 :]]
                if (seconds := token_time(units, specs, tried)) < token_s * (1 - 1e-9):
                    owners, token_s = tried, seconds
                    break
        if token_s == before:
            break
    return replace(_made(units, specs, owners, token_s), rounds=plan.rounds)
