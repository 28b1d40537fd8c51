"""Which device computes which layers when groups of sequences are computed at the same time: a pipeline. Pure.

Each device has one range of units, all in its memory, and computes the passes of the groups as they come. So a round,
in which each group makes a token of each of its sequences, takes as long as the slowest device, or the busiest link, is
at work for all groups; or as long as one pass is under way, if that is longer. The plan has the least of that. A device
that streams would read its layers for each group anew: then it is better when all share a pass, and there is no
pipeline.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from edge_run.partition.mesh_plan import DeviceSpec, MeshPlan, UnitWork
from edge_run.partition.mesh_ring import MOST_SETS, Hop, Hops, rings

MOST_IN_FLIGHT = 8  # for each, devices keep memory for an activation
# What each token of a pass costs to compute after the first one, of what that costs: 0.4 to 1.0 where two real models
# were measured (benchmarks/mesh_many.py), most in passes of a few tokens, as groups are.
NEXT_TOKEN = 0.6
_NEVER = math.inf


def pass_cost(n_tokens: float) -> float:
    """Return what computing a pass of `n_tokens` tokens costs, of what one of one token does."""
    return 1 + NEXT_TOKEN * (max(1.0, n_tokens) - 1)


def plan_pipeline(
    units: Sequence[UnitWork], specs: Sequence[DeviceSpec], hops: Hops, sequences: int
) -> MeshPlan | None:
    """Return the plan by which a token of each of `sequences` sequences takes the least; None where there is none.

    The first device has the head and the tail, which are the first and the last unit. A plan of it alone is none.
    """
    if sequences < 2:
        return None
    plans = (_plan(units, ring, hops, sequences) for taken in _sets(specs) for ring in _rings(taken, hops))
    return min((plan for plan in plans if plan), key=lambda plan: (plan.many_s, len(plan.nodes)), default=None)


def faster_for_many(ring: MeshPlan | None, pipeline: MeshPlan | None, sequences: int) -> MeshPlan | None:
    """Return which of two plans is faster for `sequences` answers: with all in one pass, or with groups in flight."""
    if ring is None or pipeline is None:
        return ring or pipeline
    streams = any(ring.read_bytes.values())
    together_s = ring.token_s * (1.0 if streams else pass_cost(sequences))
    return pipeline if pipeline.many_s < together_s else ring


def _sets(specs: Sequence[DeviceSpec]) -> Iterator[list[DeviceSpec]]:
    """Yield sets of devices: of few others all, of many the quickest."""
    first, others = specs[0], sorted(specs[1:], key=lambda spec: -spec.compute_bytes_per_s)
    for n in range(1, len(others) + 1):
        chosen = itertools.combinations(others, n) if len(others) <= MOST_SETS else [tuple(others[:n])]
        for taken in chosen:
            yield [first, *taken]


def _rings(taken: Sequence[DeviceSpec], hops: Hops) -> Iterator[list[DeviceSpec]]:
    known = {spec.node: spec for spec in taken}
    for order in rings([spec.node for spec in taken], lambda a, b: hops(a, b).cost_s):
        yield [known[node] for node in order]


def _plan(units: Sequence[UnitWork], ring: Sequence[DeviceSpec], hops: Hops, sequences: int) -> MeshPlan | None:
    """Return the best plan over all devices of a ring, in its order."""
    ends = _best_ends(units, ring)
    if ends is None:
        return None
    owners: list[str] = []
    for spec, end in zip(ring, ends, strict=True):
        owners += [spec.node] * (end - len(owners))
    owners.append(ring[0].node)
    at_work = [
        sum(unit.token_bytes for unit, owner in zip(units, owners, strict=True) if owner == spec.node)
        / spec.compute_bytes_per_s
        for spec in ring
    ]
    nodes = [spec.node for spec in ring]
    links = [hops(a, b) for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True)]
    token_s = sum(at_work) + sum(link.token_s for link in links)
    in_flight, many_s = _best_number(at_work, links, sequences)
    return MeshPlan(tuple(owners), 1, token_s, dict.fromkeys(nodes, 0), in_flight, many_s)


def _best_number(at_work: Sequence[float], links: Sequence[Hop], sequences: int) -> tuple[int, float]:
    """Return how many groups make a round shortest, and its seconds."""

    def round_s(n_groups: int) -> float:
        width = -(-sequences // n_groups)
        under_way = sum(link.token_s + (width - 1) * link.prompt_token_s for link in links)
        under_way += pass_cost(width) * sum(at_work)
        on_links = max(n_groups * width * link.prompt_token_s for link in links)
        return max(n_groups * pass_cost(width) * max(at_work), under_way, on_links)

    numbers = range(2, min(MOST_IN_FLIGHT, sequences) + 1)
    return min(((n, round_s(n)) for n in numbers), key=lambda found: found[1])


def _best_ends(units: Sequence[UnitWork], ring: Sequence[DeviceSpec]) -> list[int] | None:
    """Return where each device's range ends, so that the slowest is quickest, and then the others are much alike.

    None where they have no room.
    """
    n = len(units) - 1  # the tail is the first device's
    sums = list(itertools.accumulate(units[:-1], UnitWork.plus, initial=UnitWork(0)))
    firsts = [_stage_s(ring[0], sums[end].plus(units[-1]), 2) if end else _NEVER for end in range(n + 1)]
    best = [(seconds, seconds**2) for seconds in firsts]  # the slowest, and the sum of squares
    chosen: list[list[int]] = []
    for spec in ring[1:]:
        before, best, starts = best, [(_NEVER, _NEVER)] * (n + 1), [0] * (n + 1)
        for end in range(2, n + 1):
            at_work = [_stage_s(spec, _between(sums[start], sums[end]), 1) for start in range(1, end)]
            found = [
                (max(slowest, s), squares + s**2) for (slowest, squares), s in zip(before[1:], at_work, strict=False)
            ]
            best[end] = min(found)
            starts[end] = 1 + found.index(best[end])
        chosen.append(starts)
    if best[n][0] == _NEVER:
        return None
    ends = [n]
    for starts in reversed(chosen):
        ends.append(starts[ends[-1]])
    return ends[::-1]


def _between(start: UnitWork, end: UnitWork) -> UnitWork:
    """Return what is in the sum `end` and not in the sum `start`."""
    return UnitWork(
        end.weight_bytes - start.weight_bytes, end.kept_bytes - start.kept_bytes, end.token_bytes - start.token_bytes
    )


def _stage_s(spec: DeviceSpec, work: UnitWork, n_ranges: int) -> float:
    """Return the seconds that a device computes `work` for a token; infinite where it has no room for it."""
    held_bytes = work.weight_bytes + work.kept_bytes + n_ranges * spec.range_bytes
    is_allowed = spec.most_weight_bytes is None or work.weight_bytes <= spec.most_weight_bytes
    return work.token_bytes / spec.compute_bytes_per_s if held_bytes <= spec.memory_bytes and is_allowed else _NEVER
