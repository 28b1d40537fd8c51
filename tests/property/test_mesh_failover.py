"""Failover as a state machine: whatever happens, it ends running, with devices that are there, under a new epoch."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_run.base.errors import BudgetError
from edge_run.runtime.mesh.failover import (
    FORGET_S,
    MOST_MISFITS,
    RETURN_S,
    Apart,
    Appeared,
    Better,
    Deposed,
    Event,
    Failover,
    GaveUp,
    Gone,
    Lead,
    Led,
    LessRoom,
    MakePlan,
    Moved,
    NotLed,
    Open,
    Opened,
    Phase,
    Planned,
    Refused,
    Replayed,
    ReplayLog,
)

NODES = ("b", "c", "d", "e")


class World:
    """Carries instructions out; `draw` decides what goes wrong meanwhile."""

    def __init__(self, draw: st.DataObject) -> None:
        self.draw = draw
        self.alive = set(NODES)
        self.lease = 3
        self.opened: tuple[int, tuple[str, ...]] | None = None
        self.epochs: list[int] = []
        self.machine = Failover("a", NODES)
        self.ends: Counter[str] = Counter()
        self.parted = 0

    def fault(self) -> Event | None:
        kind = self.draw.draw(st.sampled_from(["none"] * 4 + ["gone", "refused", "gave up", "apart", "stale"]))
        if kind == "stale":
            return self.draw.draw(
                st.sampled_from([Opened(0), Replayed(0), Led(1), Gone("z", "never was"), Apart("b", "z"), NotLed("x")])
            )
        if kind == "none" or not self.alive:
            return None
        node = self.draw.draw(st.sampled_from(sorted(self.alive)))
        if kind == "apart":
            self.parted += 1
            return Apart("a", node) if node in self.machine.nodes and self.parted <= len(NODES) else None
        if kind == "gave up":
            if node not in self.machine.nodes:
                return None
            self.ends[node] += 1
            if self.ends[node] > MOST_MISFITS:
                self.alive.discard(node)
            return GaveUp(node, "had lost touch")
        self.alive.discard(node)
        return Gone(node, "dead") if kind == "gone" else Refused(node, "no")

    def run(self, event: Event | None = None) -> None:
        waiting = self.machine.handle(event) if event else self.machine.start()
        for _ in range(400):
            self.machine.check()
            if not waiting:
                break
            instruction = waiting.pop(0)
            answer = self.execute(instruction)
            if answer is not None:
                waiting = self.machine.handle(answer) or waiting
        assert self.machine.phase is Phase.RUNNING, "it ends, and runs"
        assert self.opened == (self.machine.epoch, self.machine.nodes), "on what is open"
        assert set(self.machine.nodes) <= self.alive | {"a"} or self.machine.nodes == ("a",)

    def execute(self, instruction: object) -> Event | None:
        if isinstance(instruction, Lead):
            self.lease += self.draw.draw(st.integers(0, 2))
            return (
                NotLed("away") if self.draw.draw(st.booleans()) and self.draw.draw(st.booleans()) else Led(self.lease)
            )
        if isinstance(instruction, MakePlan | Open | ReplayLog) and (fault := self.fault()):
            concerned = instruction.candidates if isinstance(instruction, MakePlan) else self.machine.nodes
            if isinstance(fault, Gone | Refused | GaveUp | Apart) and fault.node in concerned:
                return fault
            assert not self.machine.handle(fault), "what does not concern the step at hand changes nothing of it"
        if isinstance(instruction, MakePlan):
            assert set(instruction.candidates) <= set(NODES)
            chosen = [node for node in instruction.candidates if self.draw.draw(st.booleans())]
            return Planned(("a", *chosen))
        if isinstance(instruction, Open):
            if len(instruction.nodes) > 1:
                assert all(instruction.epoch > epoch for epoch in self.epochs), "every plan has a later epoch"
                self.epochs.append(instruction.epoch)
                if self.draw.draw(st.integers(0, 9)) == 0:
                    return LessRoom(self.draw.draw(st.sampled_from(instruction.nodes)), BudgetError("too little room"))
            self.opened = instruction.epoch, instruction.nodes
            return Opened(instruction.epoch)
        if isinstance(instruction, ReplayLog):
            assert self.opened == (instruction.epoch, self.machine.nodes), "all is open before it is said again"
            return Replayed(instruction.epoch)
        return None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_it_always_goes_on_with_those_that_are_there(data: st.DataObject) -> None:
    world = World(data)
    world.run()
    for _ in range(data.draw(st.integers(0, 6))):
        kind = data.draw(st.sampled_from(["gone", "blip", "back", "better", "deposed", "moved"]))
        if kind == "gone" and world.alive:
            node = data.draw(st.sampled_from(sorted(world.alive)))
            world.alive.discard(node)
            world.run(Gone(node, "dead"))
        elif kind == "blip" and world.alive:
            node = data.draw(st.sampled_from(sorted(world.alive)))
            world.run(Gone(node, "silent for a moment"))
            if node in world.alive and world.machine.may_return(node):  # it may have died meanwhile
                world.machine.handle(Appeared(node))
                assert node in world.machine.candidates
        elif kind == "back":
            node = data.draw(st.sampled_from(NODES))
            world.machine.handle(Appeared(node))
            if node not in world.machine.left_out:
                world.alive.add(node)
        elif kind == "moved":
            assert not world.machine.handle(Moved(data.draw(st.sampled_from((*NODES, "a")))))
        elif kind == "deposed":
            world.run(Deposed("another leads"))
        else:
            world.run(Better("faster"))


def test_one_that_refused_does_not_come_back_and_one_that_was_lost_does() -> None:
    machine = Failover("a", ["b", "c"])
    machine.start()
    machine.handle(Led(1))
    machine.handle(Refused("b", "no such model"))
    machine.handle(Planned(("a", "c")))
    machine.handle(Opened(machine.epoch))
    machine.handle(Replayed(machine.epoch))
    machine.handle(Gone("c", "dead"))
    machine.handle(Appeared("b"))
    machine.handle(Appeared("c"))
    assert machine.candidates == {"c"}
    assert machine.why_more == "a device joined"


def refused_by_b(now: list[float]) -> Failover:
    """A run that leads three other devices, one of which has refused it; `now` has its time."""
    machine = Failover("a", ["b", "c", "d"], lambda: now[0])
    machine.start()
    machine.handle(Led(1))
    machine.handle(Refused("b", "no such file"))
    return machine


def test_one_that_refused_is_asked_again_when_it_was_started_anew_or_after_a_while() -> None:
    now = [0.0]
    machine = refused_by_b(now)
    machine.handle(Refused("c", "another process computes with it", is_for_now=True))
    machine.handle(Gone("d", "did not answer an order"))
    assert not any(map(machine.may_return, "bcd"))
    machine.handle(Appeared("b", is_anew=True))
    assert machine.candidates == {"b"}
    now[0] = RETURN_S
    assert [node for node in "bcd" if machine.may_return(node)] == ["c", "d"]
    machine.handle(Appeared("c"))
    assert not machine.left_out
    for _ in range(MOST_MISFITS):
        machine.handle(Refused("c", "another process computes with it", is_for_now=True))
        now[0] += RETURN_S
    assert not machine.may_return("c"), "it was asked often enough"
    now[0] += FORGET_S
    assert machine.may_return("c")


def test_one_that_was_not_reached_is_asked_again_once_it_or_this_device_has_another_address() -> None:
    now = [0.0]
    machine = refused_by_b(now)
    machine.handle(Refused("c", "its data link is not reached from here", is_for_now=True))
    machine.handle(Planned(("a",)))
    machine.handle(Moved("d"))
    assert not machine.why_more, "all of its links were of use, and no plan has a part for it"
    machine.handle(Moved("b", frozenset("ab")))
    assert not machine.why_more, "no plan may have a part for it"
    machine.handle(Moved("d", frozenset("ad")))
    assert machine.why_more == "a device has another address"
    for moved in "ca":
        machine.handle(Moved("b"))
        machine.handle(Moved("passing"))
        assert not any(map(machine.may_return, ("b", "c", "passing")))
        machine.handle(Moved(moved))
        assert [node for node in "bcd" if machine.may_return(node)] == ["c"]
        machine.handle(Refused("c", "it does not reach this device's data link", is_for_now=True))


def test_one_that_was_lost_and_is_there_is_asked_again_a_few_times() -> None:
    machine = Failover("a", ["b", "c"])
    machine.start()
    for number in range(1, MOST_MISFITS + 2):
        machine.handle(Led(1))
        machine.handle(Planned(("a", "b", "c")))
        machine.handle(Opened(machine.epoch))
        machine.handle(Replayed(machine.epoch))
        assert not machine.may_return("b"), "it has a part"
        machine.handle(Gone("b", "silent for a moment"))
        assert machine.may_return("b") == (number <= MOST_MISFITS)
        machine.handle(Appeared("b"))  # of its own accord it may always
        machine.handle(Better("a device joined"))
    machine.handle(Led(1))
    machine.handle(Gone("c", "did not answer an order"))
    assert not machine.may_return("c"), "asking it again would take as long"


def test_a_loss_counts_once_and_only_of_who_was_to_take_part() -> None:
    """A pass notes it, and presence tells it again; who comes and goes beside a run that lasts for weeks is no loss."""
    now = [0.0]
    machine = Failover("a", ["b", "c"], lambda: now[0])
    machine.start()
    machine.handle(Led(1))
    machine.handle(Refused("c", "no such file"))
    for _ in range(MOST_MISFITS):
        machine.handle(Planned(("a", "b")))
        machine.handle(Opened(machine.epoch))
        machine.handle(Replayed(machine.epoch))
        for _ in range(2):
            machine.handle(Gone("b", "the connection broke"))
        machine.handle(Gone("c", "it left"))
        machine.handle(Gone("passing", "it left"))
        assert machine.may_return("b")
        machine.handle(Appeared("b"))
        machine.handle(Better("a device joined"))
        machine.handle(Led(1))
    now[0] = RETURN_S
    assert not machine.may_return("c"), "it refused for good"
    assert not machine.may_return("passing")


def test_what_is_said_under_an_earlier_epoch_counts_for_nothing() -> None:
    machine = Failover("a", ["b"])
    machine.start()
    machine.handle(Led(1))
    machine.handle(Planned(("a", "b")))
    first = machine.epoch
    assert machine.handle(Opened(first - 1)) == []
    machine.handle(Opened(first))
    machine.handle(Replayed(first))
    assert machine.handle(Better("faster"))[-1] == Lead()
    machine.handle(Led(1))
    assert machine.epoch > first, "under the same lease too"


def test_one_with_less_room_is_planned_with_again_a_few_times() -> None:
    machine = Failover("a", ["b", "c"])
    machine.start()
    for number in range(MOST_MISFITS + 1):
        machine.handle(Led(1))
        machine.handle(Planned(("a", *sorted(machine.candidates))))
        assert machine.handle(LessRoom("b", BudgetError("too small")))[-1] == Lead()
        assert machine.candidates == ({"b", "c"} if number < MOST_MISFITS else {"c"})
    assert "too small" in machine.left_out["b"].why
    assert machine.handle(LessRoom("b", BudgetError("too small"))) == [], "it has no part any more"


def test_one_that_gives_up_again_and_again_is_done_without() -> None:
    machine = Failover("a", ["b", "c"])
    machine.start()
    for number in range(MOST_MISFITS + 1):
        machine.handle(Led(1))
        machine.handle(Planned(("a", *sorted(machine.candidates))))
        machine.handle(Opened(machine.epoch))
        machine.handle(Replayed(machine.epoch))
        assert machine.handle(GaveUp("b", "had lost touch"))[-1] == Lead()
        assert machine.candidates == ({"b", "c"} if number < MOST_MISFITS else {"c"})
    assert machine.handle(GaveUp("b", "had lost touch")) == [], "it has no part any more"
