"""A device that gets another address: a new plan is made where that may have a part for more devices, else none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from edge_run.runtime.mesh.failover import Failover, Led, Opened, Planned, Replayed
from edge_run.runtime.mesh.links import MeasuredLinks
from edge_run.runtime.mesh.run import MeshRun
from fake_mesh import Hub


def three_devices() -> tuple[Hub, Any, MeasuredLinks]:
    """Return where a, b and c meet, the mesh as a sees it, and what a found of their links: nothing yet."""
    hub = Hub()
    mesh, *_ = (hub.join(node) for node in "abc")
    return hub, mesh, MeasuredLinks(mesh, lambda orders, timeout_s: ({}, {}), 1)


def test_only_a_link_that_was_of_no_use_makes_another_address_worth_a_plan() -> None:
    hub, mesh, links = three_devices()
    run: Any = MeshRun.__new__(MeshRun)
    run._mesh, run._coordinator, run.log = mesh, SimpleNamespace(links=links), ["a token"]
    run._asked, run._failover = {member.node: member for member in mesh.members()}, Failover("a", "bc")
    run._failover.start()
    for event in (Led(1), Planned(("a", "b")), Opened(1 << 16), Replayed(1 << 16)):
        run._failover.handle(event)
    moves = iter(range(1, 10))

    def why_more(moving: str) -> str:
        hub.members[moving].move(f"tcp://10.0.0.{next(moves)}:5000")
        run._look_who_is_back()
        why: str = run._failover.why_more
        return why

    assert [why_more(node) for node in "abc"] == [""] * 3
    links.note_apart("a", "b")
    assert why_more("b") == "", "both have a part"
    links.note_apart("b", "c")
    assert why_more("b") == "a device has another address", "it may hand on to c now"
    run._failover.why_more = ""
    assert why_more("c") == "", "that was tried no more since"


def test_what_was_found_at_the_old_address_does_not_bear_on_a_plan_that_is_made_in_that_moment() -> None:
    hub, mesh, links = three_devices()
    plan = SimpleNamespace(nodes=("a", "b", "c"))
    asked = list[bool]()

    def make_plan(tokens: int, *, may_group: bool) -> SimpleNamespace:
        asked.append(may_group)
        return plan

    coordinator: Any = SimpleNamespace(links=links, specs={}, prepare=lambda nodes: None, make_plan=make_plan)
    run: Any = MeshRun.__new__(MeshRun)
    run._mesh, run._coordinator, run._failover = mesh, coordinator, Failover("a", "bc")
    run._events, run.log = SimpleNamespace(take_returns=set), SimpleNamespace(tokens=0)
    run.in_flight = SimpleNamespace(may_group=True)
    run._asked = {member.node: member for member in mesh.members()}
    links.note_apart("b", "c")
    run._make_plan(["b", "c"])
    assert links.apart(("b", "c")), "nobody moved"
    hub.members["c"].move("tcp://10.0.0.1:5000")
    run.in_flight.may_group = False
    run._make_plan(["b", "c"])
    assert not links.apart(("b", "c"))
    assert not run._failover.why_more, "there is a plan already that takes it into account"
    assert asked == [True, False]
