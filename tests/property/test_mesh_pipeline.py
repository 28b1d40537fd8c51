"""Plans of pipelines: no other way to share the layers out over the same devices has a slowest one that is quicker."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_specs import MB, specs
from edge_run.partition.mesh_pipeline import pass_cost, plan_pipeline
from edge_run.partition.mesh_plan import DeviceSpec, UnitWork
from edge_run.partition.mesh_ring import Hop

SIZES = st.lists(st.integers(1, 120), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(specs(3), SIZES, st.integers(0, 100), st.integers(2, 20))
def test_no_plan_of_its_devices_has_a_quicker_slowest_one(
    among: list[DeviceSpec], sizes: list[int], tail: int, sequences: int
) -> None:
    units = [UnitWork(0), *(UnitWork(size * MB, 1 * MB) for size in sizes), UnitWork(tail * MB)]
    plan = plan_pipeline(units, among, lambda a, b: Hop(0.0), sequences)
    if plan is None:
        rings = [ring for n in range(2, len(among) + 1) for ring in itertools.permutations(among[1:], n - 1)]
        assert not any(possible(units, (among[0], *ring)) for ring in rings)
        return
    known = {spec.node: spec for spec in among}
    owners = [known[node] for node in plan.owners]
    found = possible(units, tuple(known[node] for node in plan.nodes))
    assert owners in found
    assert slowest_s(units, owners) == pytest.approx(min(slowest_s(units, one) for one in found))
    cost = pass_cost(-(-sequences // plan.most_in_flight))
    assert plan.many_s >= plan.most_in_flight * cost * slowest_s(units, owners) * (1 - 1e-9)


def possible(units: list[UnitWork], ring: tuple[DeviceSpec, ...]) -> list[list[DeviceSpec]]:
    """Return all ways for which the devices of `ring` have room."""
    return [owners for owners in ways(units, ring) if all(fits(units, owners, spec) for spec in ring)]


def ways(units: list[UnitWork], ring: tuple[DeviceSpec, ...]) -> list[list[DeviceSpec]]:
    """Return all ways to give each device of `ring` a range, and the first one the tail."""
    n = len(units) - 1
    found = []
    for borders in itertools.combinations(range(1, n), len(ring) - 1):
        ends = (*borders, n)
        owners = [next(spec for spec, end in zip(ring, ends, strict=True) if unit < end) for unit in range(n)]
        found.append([*owners, ring[0]])
    return found


def fits(units: list[UnitWork], owners: list[DeviceSpec], spec: DeviceSpec) -> bool:
    own = [unit for unit, owner in zip(units, owners, strict=True) if owner is spec]
    return sum(unit.weight_bytes + unit.kept_bytes for unit in own) <= spec.memory_bytes


def slowest_s(units: list[UnitWork], owners: list[DeviceSpec]) -> float:
    """Return what the slowest device computes for a token."""
    return max(
        sum(unit.token_bytes for unit, owner in zip(units, owners, strict=True) if owner is spec)
        / spec.compute_bytes_per_s
        for spec in owners
    )
