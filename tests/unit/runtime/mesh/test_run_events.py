"""What happens to a mesh while a run computes: what ends a pass ends it, the rest waits, and not without bound."""

from __future__ import annotations

import pytest

from edge_run.base.errors import DeviceLost
from edge_run.base.mesh import HasLeft, Joined, Lost, Member, MeshEvent, Unled
from edge_run.runtime.mesh.run_events import LeaseLost, RunEvents, is_end_of_lease
from fake_mesh import Hub


def test_what_members_say_of_themselves_during_a_pass_is_kept_once() -> None:
    hub = Hub()
    mesh = hub.join("a")
    hub.join("b").announce({"models": ["m"]})
    events = RunEvents(mesh)
    for number in range(50):
        hub.members["b"].announce({"models": ["m"], "number": number})
        events.check((), 1)
    (joined,) = events._kept
    assert isinstance(joined, Joined)
    assert joined.member.capabilities["number"] == 49
    mesh.events.put(Lost("c", "gone"))
    mesh.events.put(joined)
    with pytest.raises(DeviceLost):
        events.check(("c",), 1)
    assert list(events.take()) == [joined], "and what came after a loss"


def test_who_has_left_leads_nobody_and_has_no_end_of_events() -> None:
    hub = Hub()
    mesh = hub.join("a")
    events = RunEvents(mesh)
    mesh.events.put(Lost("c", "gone"))
    events.check((), 1)

    def left(*, timeout_s: float) -> tuple[MeshEvent, ...]:
        raise HasLeft("mesh: is closed")

    mesh.wait = left  # type: ignore[method-assign]
    with pytest.raises(LeaseLost, match="mesh: is closed"):
        events.check(("b",), 7)
    assert events.why_unled == "mesh: is closed"
    for _ in range(3):
        events.check((), 7)
    assert events.take_end_of_lease(7)
    taken = list(events.take())
    assert taken[0] == Lost("c", "gone"), "and what was heard before"
    assert is_end_of_lease(taken[-1], 7)


def test_what_is_heard_with_the_end_of_a_lease_is_kept_as_all_else_is() -> None:
    hub = Hub()
    mesh = hub.join("a")
    events = RunEvents(mesh)
    for number in range(3):
        mesh.events.put(Joined(Member("b", f"box {number}", "1", {})))
    mesh.events.put(Unled(7))
    assert events.take_end_of_lease(7)
    assert events.names == {"a": "name of a", "b": "box 2"}
    assert [event.member.name for event in events.take() if isinstance(event, Joined)] == ["box 2"]
    assert not events.take_end_of_lease(7)


def test_the_loss_of_one_that_is_there_again_is_taken_back_once_it_is_asked_anew() -> None:
    """Else it would end the pass that the device has its part of."""
    hub = Hub()
    mesh = hub.join("a")
    events = RunEvents(mesh)
    for node in "bcd":
        hub.join(node)
    for node in "bcd":
        hub.kill(node)
    again = hub.join("c").member
    left = events.take()
    assert next(left) == Lost("b", "it does not answer")
    assert events.take_returns() == {"c"}
    assert list(left) == [Lost("d", "it does not answer"), Joined(again)]
    assert not events.take_returns()


def test_names_are_known_of_devices_that_have_gone_and_nothing_else() -> None:
    hub = Hub()
    mesh = hub.join("a")
    events = RunEvents(mesh)
    mesh.events.put(Joined(Member("b", "box", "1", {"much": "x" * 1000})))
    list(events.take())
    assert events.names == {"a": "name of a", "b": "box"}
    assert not hasattr(events._seen["b"], "capabilities")
