"""Plans over links of measured speed: as fast as the best of all sets and orders, and slow links left out."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_specs import MB, specs, takes_under
from edge_run.partition.mesh_plan import DeviceSpec, UnitWork, plan_mesh, token_time
from edge_run.partition.mesh_ring import Hop, Hops, own_shares, plan_ring, rings

SECONDS = st.sampled_from([0.0002, 0.001, 0.005, 0.03, 0.2])


def between(costs: dict[tuple[str, str], float]) -> Hops:
    return lambda a, b: Hop(costs[a, b])


def around(order: tuple[DeviceSpec, ...], hops: Hops) -> list[DeviceSpec]:
    """Return devices with what the hops next to each take of a round, halved between its ends."""
    names = [s.node for s in order]
    if len(names) == 1:
        return list(order)
    pairs = zip(order, names[-1:] + names[:-1], names[1:] + names[:1], strict=True)
    return [replace(s, hop_s=(hops(a, s.node).token_s + hops(s.node, b).token_s) / 2) for s, a, b in pairs]


@settings(max_examples=30, deadline=None)
@given(specs(4), st.integers(2, 6), st.integers(10, 200), st.data())
def test_no_set_of_devices_is_faster(among: list[DeviceSpec], n_blocks: int, weight: int, data: st.DataObject) -> None:
    units = [UnitWork(0), *[UnitWork(weight * MB)] * n_blocks, UnitWork(30 * MB)]
    costs = {(a.node, b.node): data.draw(SECONDS) for a, b in itertools.permutations(among, 2)}
    plan = plan_ring(units, among, between(costs))
    known = {s.node: s for s in among}
    found: dict[bool, list[float]] = {True: [], False: []}  # on the shortest ring of a set, or on another
    for others in itertools.chain.from_iterable(itertools.permutations(among[1:], n) for n in range(len(among))):
        names = [among[0].node, *(s.node for s in others)]
        one = plan_mesh(units, around((among[0], *others), between(costs)))
        if one and list(one.nodes) == names:  # else its stage visits make another ring, which has its own plan
            found[names in rings(names, lambda a, b: costs[a, b])].append(one.token_s)
    if plan is None:
        assert not found[True]
        return
    order = tuple(known[node] for node in plan.nodes)
    assert plan.token_s == pytest.approx(token_time(units, around(order, between(costs)), plan.owners))
    assert plan.token_s <= min(found[True]) * (1 + 1e-6)
    assert plan.token_s <= min(*found[True], *found[False], 1e9) * 1.5, "in another order the rounds may fall better"


def small(n: int, memory: int = 250) -> list[DeviceSpec]:
    return [DeviceSpec(f"n{i}", memory * MB, 10_000 * MB, 100 * MB, 0.0, 20 * MB) for i in range(n)]


@pytest.mark.parametrize(
    ("far_s", "memory", "is_taken"),
    [(0.5, 250, False), (0.0005, 250, True), (0.1, 150, True)],
    ids=["the others have room for all", "it is the nearest", "without it much is read"],
)
def test_a_device_behind_a_slow_link_is_left_out_when_it_slows_the_rest(
    far_s: float, memory: int, is_taken: bool
) -> None:
    units = [UnitWork(0), *[UnitWork(50 * MB)] * 8, UnitWork(10 * MB)]
    pairs = itertools.permutations(["n0", "n1", "n2"], 2)
    plan = plan_ring(units, small(3, memory), between({pair: far_s if "n1" in pair else 0.001 for pair in pairs}))
    assert plan is not None
    assert ("n1" in plan.nodes) is is_taken


def test_two_that_do_not_reach_each_other_well_do_not_stand_side_by_side() -> None:
    units = [UnitWork(0), *[UnitWork(50 * MB)] * 12, UnitWork(10 * MB)]
    names = [f"n{i}" for i in range(4)]
    costs = dict.fromkeys(itertools.permutations(names, 2), 0.001)
    costs["n1", "n2"] = costs["n2", "n1"] = 0.3
    plan = plan_ring(units, small(4, 170), between(costs))
    assert plan is not None
    assert plan.nodes in (("n0", "n1", "n3", "n2"), ("n0", "n2", "n3", "n1"))
    assert plan.token_s < 0.3


def test_a_link_of_little_bandwidth_counts_for_prompts_too() -> None:
    units = [UnitWork(0), *[UnitWork(50 * MB)] * 8, UnitWork(10 * MB)]
    hop = Hop(0.001, 1.0)
    plan = plan_ring(units, small(2), lambda a, b: hop)
    assert plan is not None
    assert plan.nodes == ("n0",)
    plan = plan_ring(units, small(2), lambda a, b: Hop(0.001, 0.001))
    assert plan is not None
    assert plan.nodes == ("n0", "n1")
    assert plan.token_s == pytest.approx(token_time(units, [replace(s, hop_s=0.001) for s in small(2)], plan.owners))


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=8))
def test_a_star_is_seen_as_one(own: list[float]) -> None:
    names = [f"n{i}" for i in range(len(own))]
    costs = dict(zip(names, own, strict=True))
    found = own_shares(names, lambda a, b: costs[a] + costs[b])
    if len(own) == 2:
        assert sum(found.values()) == pytest.approx(2 * sum(own))
    else:
        assert [found[name] for name in names] == pytest.approx([2 * seconds for seconds in own], abs=1e-9)


@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_a_ring_has_all_and_begins_with_the_first(n: int, draw: object) -> None:
    names = [f"n{i}" for i in range(n)]
    costs = {pair: draw.random() for pair in itertools.product(names, repeat=2)}  # type: ignore[attr-defined]
    order = rings(names, lambda a, b: costs[a, b])[0]
    assert order[0] == "n0"
    assert sorted(order) == sorted(names)


def test_sixteen_devices_on_uneven_links_take_under_a_second() -> None:
    units = [UnitWork(0), *[UnitWork(500 * MB, 4 * MB)] * 128, UnitWork(500 * MB)]
    among = [
        DeviceSpec(f"n{i}", (2 + i % 5) * 1000 * MB, (5 + i) * 1000 * MB, (200 + 50 * i) * MB, 0.0, 60 * MB)
        for i in range(16)
    ]
    for devices in (among, among[:4]):

        def plan(devices: list[DeviceSpec] = devices) -> object:
            return plan_ring(units, devices, lambda a, b: Hop(0.001 * (1 + len(a + b) % 3)))

        assert plan() is not None
        assert takes_under(1, plan)
