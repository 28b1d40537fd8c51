"""How long a run waits for a device that fetches its layers: as long as they come, however slowly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from edge_run.base.fields import Document
from edge_run.base.units import MIB
from edge_run.partition.mesh_plan import MeshPlan
from edge_run.runtime.mesh import fetch
from edge_run.runtime.mesh.failover import LessRoom, Refused
from edge_run.runtime.mesh.fetch import LEAST_FETCHED_BYTES, MOST_PROVIDERS, MeshFetch
from edge_run.runtime.mesh.orders import STALL_S
from edge_run.tiers.pieces import PIECE_BYTES
from fake_mesh import Hub

PLAN = MeshPlan(("a", "b"), 1, 1.0, {})
WANTED_BYTES = 16 * MIB


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which passes where somebody waits."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(fetch, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


def fetched(so_far: Iterator[int]) -> Refused | LessRoom | None:
    """What comes of a device that says each time that it has so many bytes."""
    mesh_fetch = MeshFetch(Hub().join("a"), 2, lambda text: None, lambda: None)
    mesh_fetch.note("b", {"missing_bytes": [WANTED_BYTES] * 2, "most_weight_bytes": 10 * WANTED_BYTES})

    def give(orders: dict[str, Document]) -> dict[str, Document]:
        if orders["b"]["order"] == "fetch":
            return {"b": {"wanted_bytes": WANTED_BYTES, "is_over": False, "why": ""}}
        done_bytes = min(WANTED_BYTES, next(so_far))
        progress: Document = {"wanted_bytes": WANTED_BYTES, "done_bytes": done_bytes, "why": ""}
        return {"b": {"fetch": {**progress, "is_over": done_bytes == WANTED_BYTES}}}

    return mesh_fetch.run(PLAN, {}, give)


@pytest.mark.parametrize(
    "so_far", [itertools.repeat(0), itertools.count(), itertools.cycle((0, PIECE_BYTES))], ids=["none", "bytes", "one"]
)
def test_who_fetches_hardly_anything_is_not_waited_for(so_far: Iterator[int], clock: list[float]) -> None:
    refusal = fetched(so_far)
    assert isinstance(refusal, Refused)
    assert (refusal.node, "hardly anything for 120 s" in refusal.why) == ("b", True), refusal.why
    assert STALL_S < clock[0] < STALL_S + 1


def test_who_fetches_slowly_is_waited_for(clock: list[float]) -> None:
    so_far = (n * LEAST_FETCHED_BYTES // 400 for n in itertools.count())  # in 100 s
    assert fetched(so_far) is None
    assert clock[0] > 10 * STALL_S


def test_no_more_devices_are_named_to_fetch_from_than_an_order_may_name() -> None:
    """A device refused such an order, and was left out, on each cluster of more than so many that have the file."""
    given: list[Document] = []
    nodes = ("a", *(f"n{number}" for number in range(100)), "b")
    mesh_fetch = MeshFetch(Hub().join("a"), len(nodes), lambda text: None, lambda: None)
    mesh_fetch.note("b", {"missing_bytes": [WANTED_BYTES] * len(nodes), "most_weight_bytes": 10 * WANTED_BYTES})

    def give(orders: dict[str, Document]) -> dict[str, Document]:
        given.append(orders["b"])
        return {"b": {"wanted_bytes": 0, "is_over": True, "why": ""}}

    assert mesh_fetch.run(MeshPlan(nodes, 1, 1.0, {}), {}, give) is None
    assert given[0]["providers"] == list(nodes[:MOST_PROVIDERS])
