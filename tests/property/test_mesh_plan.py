"""The layer planner: as fast as the best of all plans, and never one that cannot be."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_specs import MB, specs, takes_under
from edge_run.partition import mesh_plan
from edge_run.partition.mesh_plan import ROUNDS, DeviceSpec, UnitWork, plan_mesh, token_time


def every_plan(n_blocks: int, among: list[DeviceSpec]) -> list[tuple[str, ...]]:
    """Return the owners of all plans: counts for each, spread over any number of rounds."""
    found = set()
    for counts in itertools.product(range(n_blocks + 1), repeat=len(among)):
        if sum(counts) != n_blocks:
            continue
        for rounds in (r for r in ROUNDS if r <= n_blocks):
            owners = [among[0].node]
            for r in range(rounds):
                for spec, count in zip(among, counts, strict=True):
                    owners += [spec.node] * ((r + 1) * count // rounds - r * count // rounds)
            found.add((*owners, among[0].node))
    return sorted(found)


def assert_best(units: list[UnitWork], among: list[DeviceSpec]) -> None:
    """Assert that no plan of all there are is faster than the one that is made, nor possible where none is."""
    best = min(token_time(units, among, owners) for owners in every_plan(len(units) - 2, among))
    plan = plan_mesh(units, among)
    if plan is None:
        assert best == float("inf")
        return
    assert plan.token_s == pytest.approx(token_time(units, among, plan.owners))
    assert plan.token_s <= best * (1 + 1e-6)


@settings(max_examples=60, deadline=None)
@given(specs(), st.integers(1, 6), st.integers(10, 200), st.integers(0, 10))
def test_no_plan_of_all_is_faster(among: list[DeviceSpec], n_blocks: int, weight: int, kept: int) -> None:
    units = [UnitWork(0), *[UnitWork(weight * MB, kept * MB)] * n_blocks, UnitWork(30 * MB)]
    assert_best(units, among)


@settings(max_examples=60, deadline=None)
@given(specs(), st.integers(1, 6), st.integers(10, 200), st.integers(0, 10))
def test_the_search_finds_the_best_plan_where_nothing_streams(
    among: list[DeviceSpec], n_blocks: int, weight: int, kept: int
) -> None:
    among = [replace(spec, memory_bytes=2000 * MB) for spec in among]
    units = [UnitWork(0), *[UnitWork(weight * MB, kept * MB)] * n_blocks, UnitWork(30 * MB)]
    best = min(token_time(units, among, owners) for owners in every_plan(n_blocks, among))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh_plan, "MOST_TRIED", 0)
        plan = plan_mesh(units, among)
    assert plan is not None
    assert plan.token_s <= best * (1 + 1e-6)


@settings(max_examples=60, deadline=None)
@given(specs(3), st.integers(1, 6), st.integers(10, 200), st.integers(0, 400))
def test_keys_and_values_in_a_file_make_room_and_are_read(
    among: list[DeviceSpec], n_blocks: int, weight: int, kept: int
) -> None:
    units = [UnitWork(0), *[UnitWork(weight * MB, kept * MB)] * n_blocks, UnitWork(30 * MB)]
    spilling = [replace(spec, least_kept_bytes=2 * kept * MB or 1, least_kept_share=0.1) for spec in among]
    assert_best(units, spilling)
    plan, whole = plan_mesh(units, spilling), plan_mesh(units, among)
    if plan is None:
        assert whole is None
        return
    if whole is not None:
        assert plan.token_s <= whole.token_s * (1 + 1e-6)
    for spec in spilling:
        own = [u for u, owner in zip(units, plan.owners, strict=True) if owner == spec.node]
        if own:
            weights, kept_bytes = sum(u.weight_bytes for u in own), sum(u.kept_bytes for u in own)
            stays = weights - plan.read_bytes[spec.node]
            assert stays + min(kept_bytes, spec.least_kept_bytes + kept_bytes // 10) <= spec.memory_bytes
            assert plan.has_away or stays + kept_bytes <= spec.memory_bytes


@settings(max_examples=100, deadline=None)
@given(specs(6), st.lists(st.tuples(st.integers(5, 200), st.integers(0, 5)), min_size=1, max_size=24))
def test_every_plan_can_be_carried_out(among: list[DeviceSpec], sizes: list[tuple[int, int]]) -> None:
    units = [UnitWork(0), *(UnitWork(weight * MB, kept * MB) for weight, kept in sizes), UnitWork(30 * MB)]
    plan = plan_mesh(units, among)
    if plan is None:
        return
    assert len(plan.owners) == len(units)
    assert plan.owners[0] == plan.owners[-1] == among[0].node
    for spec in among:
        own = [u for u, owner in zip(units, plan.owners, strict=True) if owner == spec.node]
        weights, kept = sum(u.weight_bytes for u in own), sum(u.kept_bytes for u in own)
        if own:
            streamed = plan.read_bytes[spec.node]
            assert weights - streamed + kept <= spec.memory_bytes
            assert kept + (spec.window_bytes if streamed else 0) <= spec.memory_bytes
            assert streamed >= 0


@settings(max_examples=40, deadline=None)
@given(specs(), st.lists(st.integers(10, 200), min_size=2, max_size=6))
def test_units_of_unequal_size_are_planned_as_well(among: list[DeviceSpec], weights: list[int]) -> None:
    units = [UnitWork(0), *(UnitWork(weight * MB) for weight in weights), UnitWork(30 * MB)]
    assert_best(units, among)


def test_the_search_plans_units_of_unequal_size_nearly_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares out units of mean size, and then moves borders: the best plan nearly always, and never far from it."""
    monkeypatch.setattr(mesh_plan, "MOST_TRIED", 0)
    chance, ratios = random.Random(3), []
    for _ in range(300):
        among = [
            DeviceSpec(
                f"n{i}",
                chance.randint(20, 600) * MB,
                chance.randint(200, 20_000) * MB,
                chance.randint(50, 3_000) * MB,
                chance.choice([0.0002, 0.001, 0.01, 0.1]),
                chance.randint(5, 40) * MB,
            )
            for i in range(chance.randint(1, 4))
        ]
        blocks = [UnitWork(chance.randint(10, 200) * MB) for _ in range(chance.randint(2, 6))]
        units = [UnitWork(0), *blocks, UnitWork(30 * MB)]
        best = min(token_time(units, among, owners) for owners in every_plan(len(blocks), among))
        plan = plan_mesh(units, among)
        assert (plan is None) == (best == float("inf"))
        if plan is not None:
            ratios.append(plan.token_s / best)
    ratios.sort()
    assert len(ratios) > 250
    assert ratios[int(0.96 * len(ratios))] < 1.03
    assert ratios[-1] < 1.7


def test_a_device_that_slows_the_rest_is_left_out() -> None:
    units = [UnitWork(0), *[UnitWork(50 * MB)] * 8, UnitWork(10 * MB)]
    fast = DeviceSpec("fast", 1000 * MB, 10_000 * MB, 500 * MB, 0.001, 30 * MB)
    slow = DeviceSpec("slow", 1000 * MB, 100 * MB, 500 * MB, 0.050, 30 * MB)
    plan = plan_mesh(units, [fast, slow])
    assert plan is not None
    assert plan.nodes == ("fast",)


def test_rounds_keep_two_disks_busy() -> None:
    """Each streams half of what one would, and both at once."""
    units = [UnitWork(0), *[UnitWork(16 * MB)] * 64, UnitWork(10 * MB)]
    alone = DeviceSpec("a", 250 * MB, 10_000 * MB, 100 * MB, 0.0005, 40 * MB)
    one, two = (
        plan_mesh(units, [alone]),
        plan_mesh(units, [alone, DeviceSpec("b", *[250 * MB, 1e10, 1e8, 0.0005, 40 * MB])]),
    )
    assert one is not None
    assert two is not None
    assert two.rounds > 1
    assert one.token_s / two.token_s > 2.4


def test_sixteen_devices_and_128_layers_take_under_a_second() -> None:
    units = [UnitWork(0), *[UnitWork(500 * MB, 4 * MB)] * 128, UnitWork(500 * MB)]
    among = [
        DeviceSpec(f"n{i}", (2 + i % 5) * 1000 * MB, (5 + i) * 1000 * MB, (200 + 50 * i) * MB, 0.001, 60 * MB)
        for i in range(16)
    ]
    assert plan_mesh(units, among) is not None
    assert takes_under(1, lambda: plan_mesh(units, among))
