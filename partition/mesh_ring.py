"""The layer plan over links of measured speed: what each hop costs, the order of the ring, and who is left out.

`plan_mesh` takes a hop's cost to be its devices' own. With few devices every set of them is planned, on a ring ordered
so that its links are the fastest. With many, who takes part is found from the shares that each device has in its links
(the least squares of a star: each device's way to a common point), and only that set is planned with its real hops.

A hop costs time at each token that is said, and at each of a prompt. The plan is the best for an answer that says as
many tokens as it reads, and its `token_s` is what a token takes that is said.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from edge_run.partition.mesh_plan import ROUNDS, DeviceSpec, MeshPlan, UnitWork, plan_mesh, token_time

MOST_SETS, MOST_ORDERS = 3, 6  # devices besides the first of which all sets are tried (8), and all orders (720)


@dataclass(frozen=True, slots=True)
class Hop:
    """What it takes to hand an activation on.

    token_s: that of a token that is said.
    prompt_token_s: one token's share of a prompt's activations.
    """

    token_s: float
    prompt_token_s: float = 0.0

    @property
    def cost_s(self) -> float:
        """What is to be kept small."""
        return self.token_s + self.prompt_token_s


Hops = Callable[[str, str], Hop]  # from a node, to another


def plan_ring(units: Sequence[UnitWork], specs: Sequence[DeviceSpec], hops: Hops) -> MeshPlan | None:
    """Return the fastest plan, as `plan_mesh` does; the devices' own `hop_s` do not count."""
    first, others = specs[0], specs[1:]
    among: Sequence[int] = ROUNDS
    if len(others) <= MOST_SETS:
        sets = [(first, *taken) for n in range(len(others) + 1) for taken in itertools.combinations(others, n)]
    else:
        shares = own_shares([spec.node for spec in specs], lambda a, b: hops(a, b).cost_s)
        found = plan_mesh(units, [replace(s, hop_s=shares[s.node]) for s in specs])
        if found is None:
            return None
        sets, among = [tuple(s for s in specs if s.node in found.nodes), (first,)], (found.rounds,)
    plans = [plan for taken in sets for plan in _plans_of_set(units, taken, hops, among)]
    if not plans:
        return None

    def on_ring(plan: MeshPlan, cost: Callable[[Hop], float]) -> float:
        ring = _on_ring(specs, plan.nodes, lambda a, b: cost(hops(a, b)))
        return token_time(units, ring, plan.owners)

    plan = min(plans, key=lambda one: (on_ring(one, lambda hop: hop.cost_s), len(one.nodes)))
    return replace(plan, token_s=on_ring(plan, lambda hop: hop.token_s))


def _plans_of_set(
    units: Sequence[UnitWork], taken: Sequence[DeviceSpec], hops: Hops, among: Sequence[int]
) -> Iterator[MeshPlan]:
    """Yield the best plans on the rings of a set of devices, or of those of it that are of use."""
    for order in rings([spec.node for spec in taken], lambda a, b: hops(a, b).cost_s):
        plan = plan_mesh(units, _on_ring(taken, order, lambda a, b: hops(a, b).cost_s), among)
        if plan and len(plan.nodes) < len(taken):
            yield from _plans_of_set(units, [s for s in taken if s.node in plan.nodes], hops, among)
        elif plan:
            yield plan


def own_shares(nodes: Sequence[str], cost: Callable[[str, str], float]) -> dict[str, float]:
    """Return what each node adds to a round, so that two nodes' halves together are as near as can be to their link."""
    n = len(nodes)
    link = {(a, b): (cost(a, b) + cost(b, a)) / 2 for a, b in itertools.combinations(nodes, 2)}
    if n == 2:
        return dict.fromkeys(nodes, link[nodes[0], nodes[1]])
    sums = {node: sum(seconds for pair, seconds in link.items() if node in pair) for node in nodes}
    together = sum(sums.values()) / (2 * n - 2)
    return {node: 2 * max(0.0, (sums[node] - together) / (n - 2)) for node in nodes}


def rings(nodes: Sequence[str], cost: Callable[[str, str], float]) -> list[list[str]]:
    """Return the orders, from the first node on, in which a token is around the soonest: of few nodes all, of many one.

    One of many is nearly the soonest. In which of several the rounds fall best, their devices decide.
    """
    first, rest = nodes[0], list(nodes[1:])
    if not rest:
        return [[first]]

    def around(order: Sequence[str]) -> float:
        return sum(cost(a, b) for a, b in itertools.pairwise((first, *order, first)))

    if len(rest) <= MOST_ORDERS:
        orders = list(itertools.permutations(rest))
        soonest_s = min(map(around, orders))
        found = [[first, *order] for order in orders if around(order) <= soonest_s * (1 + 1e-9)]
        return found if len(rest) <= MOST_SETS else found[:1]
    order, left = [first], set(rest)
    while left:
        order.append(min(sorted(left), key=lambda node: cost(order[-1], node)))
        left.remove(order[-1])
    return [_untangled(order, lambda found: around(found[1:]))]


def _untangled(order: list[str], around: Callable[[Sequence[str]], float]) -> list[str]:
    """Return the order with parts of it turned around as long as that makes it shorter."""
    best_s, is_better = around(order), True
    while is_better:
        is_better = False
        for i, j in itertools.combinations(range(1, len(order) + 1), 2):
            tried = order[:i] + order[i:j][::-1] + order[j:]
            if (seconds := around(tried)) < best_s * (1 - 1e-9):
                order, best_s, is_better = tried, seconds, True
    return order


def _on_ring(specs: Sequence[DeviceSpec], order: Sequence[str], cost: Callable[[str, str], float]) -> list[DeviceSpec]:
    """Return the devices of a ring in its order, with half of the hop to each and of that from it as its own."""
    known = {spec.node: spec for spec in specs}
    if len(order) == 1:
        return [known[order[0]]]
    before, after = [order[-1], *order[:-1]], [*order[1:], order[0]]
    return [
        replace(known[node], hop_s=(cost(previous, node) + cost(node, following)) / 2)
        for previous, node, following in zip(before, order, after, strict=True)
    ]
