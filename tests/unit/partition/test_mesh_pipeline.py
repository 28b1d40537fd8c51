"""Plans for many answers: who computes what when groups of sequences are computed at the same time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from device_specs import MB
from edge_run.partition.mesh_pipeline import faster_for_many, pass_cost, plan_pipeline
from edge_run.partition.mesh_plan import DeviceSpec, MeshPlan, UnitWork
from edge_run.partition.mesh_ring import Hop, plan_ring

UNITS = [UnitWork(0), *[UnitWork(10 * MB)] * 12, UnitWork(20 * MB)]


def devices(n: int, memory: int = 4000, slow: str = "") -> list[DeviceSpec]:
    found = [DeviceSpec(f"n{i}", memory * MB, 1000 * MB, 500 * MB, 0.0, 20 * MB) for i in range(n)]
    return [replace(one, compute_bytes_per_s=500 * MB) if one.node == slow else one for one in found]


def quick(_: str, __: str) -> Hop:
    return Hop(0.0001)


def test_the_slowest_device_decides_so_all_have_as_much_to_compute() -> None:
    plan = plan_pipeline(UNITS, devices(4), quick, 16)
    assert plan is not None
    shares = Counter[str]()
    for unit, owner in zip(UNITS, plan.owners, strict=True):
        shares[owner] += unit.weight_bytes
    assert max(shares.values()) <= 40 * MB
    assert plan.owners[0] == plan.owners[-1] == "n0"
    assert plan.nodes[0] == "n0"
    assert plan.most_in_flight == 4
    alone_s = pass_cost(16) * 0.14
    assert plan.many_s == pytest.approx(4 * pass_cost(4) * 0.04)
    assert alone_s / plan.many_s == pytest.approx(pass_cost(16) / pass_cost(4) * 0.14 / 0.16)


def test_where_the_tail_takes_longest_the_others_share_the_rest_evenly() -> None:
    units = [UnitWork(0), *[UnitWork(10 * MB)] * 12, UnitWork(45 * MB)]
    plan = plan_pipeline(units, devices(4), quick, 8)
    assert plan is not None
    counts = Counter(plan.owners)
    assert [counts[node] for node in ("n1", "n2", "n3")] == [4, 4, 4]


def test_a_slow_device_has_less() -> None:
    plan = plan_pipeline(UNITS, devices(3, slow="n1"), quick, 8)
    assert plan is not None
    counts = Counter(plan.owners)
    assert counts["n1"] < counts["n2"]


def test_each_device_has_one_range() -> None:
    plan = plan_pipeline(UNITS, devices(4), quick, 8)
    assert plan is not None
    assert [owner for owner, before in zip(plan.owners, ("", *plan.owners), strict=False) if owner != before] == [
        *plan.nodes,
        "n0",
    ]


def test_few_answers_make_few_groups() -> None:
    plan = plan_pipeline(UNITS, devices(4), quick, 2)
    assert plan is not None
    assert plan.most_in_flight == 2
    assert plan_pipeline(UNITS, devices(4), quick, 1) is None


def test_devices_whose_layers_have_no_room_share_passes() -> None:
    small = devices(3, memory=45)
    assert plan_pipeline(UNITS, small, quick, 8) is None
    ring = plan_ring(UNITS, small, quick)
    assert faster_for_many(ring, None, 8) is ring


def test_a_device_behind_a_slow_link_is_left_out() -> None:
    plan = plan_pipeline(UNITS, devices(3), lambda a, b: Hop(0.5, 0.5) if "n2" in (a, b) else Hop(0.0001), 8)
    assert plan is not None
    assert plan.nodes == ("n0", "n1")


def test_groups_in_flight_are_for_devices_that_compute_and_one_pass_for_those_that_read() -> None:
    pipeline = plan_pipeline(UNITS, devices(4), quick, 8)
    assert pipeline is not None
    alone = MeshPlan(("n0",) * len(UNITS), 1, 0.14, {"n0": 0})
    assert faster_for_many(alone, pipeline, 8) is pipeline
    reading = MeshPlan(("n0",) * len(UNITS), 1, 0.14, {"n0": 100 * MB})
    assert faster_for_many(reading, pipeline, 8) is reading, "all its answers share what it reads"
    assert faster_for_many(None, pipeline, 8) is pipeline
