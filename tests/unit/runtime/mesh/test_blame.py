"""Who is to blame where a pass fails, and for how long that is remembered."""

from __future__ import annotations

import errno

import pytest

from edge_run.base.errors import BudgetError, EdgeRunError, TierReadError
from edge_run.runtime.mesh.blame import Blame
from edge_run.runtime.mesh.failover import FORGET_S, Apart, Gone, LessRoom, OfLate, Refused
from edge_run.runtime.mesh.orders import RunOrders
from edge_run.runtime.mesh.transport import Unreached
from fake_mesh import Hub

OTHERS = ["b", "c", "d"]


@pytest.fixture
def hub() -> Hub:
    hub = Hub()
    for node in OTHERS:
        hub.join(node).serve(lambda coordinator, epoch, order: {"place": "idle"})
    return hub


@pytest.fixture
def blame(hub: Hub) -> Blame:
    return Blame("a", RunOrders(hub.join("a"), lambda: None))


def unreached(teller: str, node: str) -> Unreached:
    return Unreached("it is not reached", node=node, teller=teller)


def test_one_that_another_one_does_not_reach_is_not_gone_while_it_answers(blame: Blame) -> None:
    """A device whose own network was broken had the run give up all the others, one after the other."""
    assert blame.event_of(unreached("b", "c"), OTHERS) == Apart("b", "c")


def test_who_does_not_reach_a_second_one_is_left_out(blame: Blame) -> None:
    blame.event_of(unreached("b", "c"), OTHERS)
    found = blame.event_of(unreached("b", "d"), OTHERS)
    assert isinstance(found, Refused)
    assert (found.node, "blames one device after another" in found.why) == ("b", True)
    assert found.is_for_now, "its network may be mended"


def test_who_does_not_reach_the_same_one_again_has_blamed_nobody_else(blame: Blame) -> None:
    """One that freezes now and then would else take the device before it along."""
    for _ in range(4):
        assert blame.event_of(unreached("b", "c"), OTHERS) == Apart("b", "c")


def test_who_is_not_reached_by_a_second_one_is_gone(blame: Blame) -> None:
    blame.event_of(unreached("b", "c"), OTHERS)
    found = blame.event_of(unreached("d", "c"), OTHERS)
    assert isinstance(found, Gone)
    assert found.node == "c"


def test_who_says_that_others_are_gone_that_are_is_believed_each_time(hub: Hub, blame: Blame) -> None:
    for node in "cd":
        hub.kill(node, is_silent=True)
        found = blame.event_of(unreached("b", node), OTHERS)
        assert isinstance(found, Gone)
        assert found.node == node


def test_what_happened_long_ago_takes_no_memory() -> None:
    now = [0.0]
    late: OfLate[str] = OfLate(lambda: now[0])
    for number in range(100):
        late.note(f"node {number}", "left")
        now[0] += FORGET_S / 2
    assert late.of("node 99") == ["left"]
    assert len(late._noted) == 2


@pytest.mark.parametrize("error", [BudgetError("no room"), TierReadError("the drive is full", errno=errno.ENOSPC)])
def test_where_this_device_lacks_room_others_may_take_its_layers(error: EdgeRunError, blame: Blame) -> None:
    assert blame.event_of(error, OTHERS) == LessRoom("a", error)
    with pytest.raises(type(error)):
        blame.event_of(error, [])
    with pytest.raises(TierReadError):
        blame.event_of(TierReadError("the drive fails", errno=errno.EIO), OTHERS)
