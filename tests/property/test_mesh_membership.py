"""Membership: who sends heartbeats is present, the silent are lost in time, and none because the broker is away."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from clock import Clock
from edge_run.base.mesh import Joined, Lost, Member
from edge_run.devices.presence import events
from edge_run.devices.presence.membership import FIRST_PATIENCE_S, IDLE, LONGEST_PATIENCE_S, NEAR_S, QUICK, Membership

SELF, INCARNATION = "self", "1"
NODES = st.sampled_from(["a", "b", "c"])


class World(RuleBasedStateMachine):
    """Anything in any order; old incarnations, lost and doubled messages."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(100.0)
        self.machine = Membership(SELF, INCARNATION, self.clock)
        self.present: dict[str, str] = {}
        self.latest: dict[str, int] = {}
        self.is_up = False
        self.reconnected_s = 0.0

    def feed(self, event: events.Event) -> None:
        for instruction in self.machine.handle(event):
            if isinstance(instruction, events.Reconnect):
                assert self.is_up, "there is nothing to leave"
                assert not self.machine.is_hearing
                assert self.clock.now_s - self.reconnected_s > FIRST_PATIENCE_S, "a broker is given some time"
                self.reconnected_s = self.clock.now_s
            if not isinstance(instruction, events.EmitEvent):
                continue
            if isinstance(instruction.event, Joined):
                self.present[instruction.event.member.node] = instruction.event.member.incarnation
            else:
                assert isinstance(instruction.event, Lost)
                assert self.present.pop(instruction.event.node, None), "nobody is lost twice, or without having joined"
                assert instruction.event.why

    @rule(node=NODES, incarnation=st.integers(1, 4), asks=st.booleans(), is_rare=st.booleans())
    def heartbeat(self, node: str, incarnation: int, asks: bool, is_rare: bool) -> None:
        self.latest[node] = max(incarnation, self.latest.get(node, 0))
        self.feed(events.Heartbeat(node, str(incarnation), asks, is_rare))

    @rule(node=NODES, incarnation=st.integers(1, 4), port=st.integers(1, 2))
    def announce(self, node: str, incarnation: int, port: int) -> None:
        self.latest[node] = max(incarnation, self.latest.get(node, 0))
        self.feed(events.Announced(node, str(incarnation), node.upper(), {}, {"port": port}))
        if incarnation == self.latest[node]:
            assert self.present.get(node) == str(incarnation)

    @rule(node=NODES, incarnation=st.integers(1, 4), is_will=st.booleans())
    def leave(self, node: str, incarnation: int, is_will: bool) -> None:
        before = dict(self.present)
        self.feed(events.Left(node, str(incarnation), is_will))
        if before.get(node) != str(incarnation):
            assert self.present == before, "the will of an old incarnation changes nothing"
        elif not is_will:
            assert node not in self.present
            self.latest.pop(node)

    @rule(node=NODES, is_up=st.booleans())
    def link(self, node: str, is_up: bool) -> None:
        self.feed(events.LinkChanged(node, is_up, "" if is_up else "broke"))

    @rule(node=NODES)
    def speak(self, node: str) -> None:
        peer = self.machine._peers.get(node)
        self.feed(events.Spoke(node))
        assert (node in self.present) == (peer is not None and peer.member is not None), "who speaks is there"

    @rule()
    def doubt(self) -> None:
        before = dict(self.present)
        self.feed(events.Doubted())
        assert self.present == before, "a doubt costs nobody"

    @rule(is_up=st.booleans())
    def broker(self, is_up: bool) -> None:
        self.is_up = is_up
        self.feed(events.BrokerChanged(is_up))

    @rule(holder=st.sampled_from([None, SELF, "a", "d"]))
    def pace(self, holder: str | None) -> None:
        self.feed(events.HolderChanged(holder))

    @precondition(lambda self: self.is_up)
    @rule()
    def echo(self) -> None:
        self.feed(events.Heartbeat(SELF, INCARNATION))

    @rule(wait_s=st.floats(0, 40))
    def wait(self, wait_s: float) -> None:
        self.clock.now_s += wait_s
        before = set(self.present)
        was_up = self.is_up
        self.feed(events.Tick())
        self.latest = {node: incarnation for node, incarnation in self.latest.items() if node in self.machine._peers}
        if not was_up and wait_s < 1:
            assert self.machine.is_hearing is False
        assert set(self.present) <= before, "time alone brings nobody"

    @invariant()
    def check(self) -> None:
        self.machine.check()
        assert {node: member.incarnation for node, member in self.machine.present().items()} == self.present


World.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestWorld = World.TestCase


class Table:
    """A machine whose broker works, and the devices that it hears. `holder` leads."""

    def __init__(self, *, is_quick: bool, holder: str = "a") -> None:
        self.clock = Clock(100.0)
        self.machine = Membership(SELF, INCARNATION, self.clock)
        self.machine.handle(events.BrokerChanged(True))
        self.machine.handle(events.HolderChanged(holder if is_quick else None))
        self.pace = QUICK if is_quick else IDLE
        self.lost: dict[str, float] = {}
        self.sent: list[events.SendHeartbeat] = []
        for node in "ab":
            self.machine.handle(events.Announced(node, "1", node, {}, {}))

    def go_on(self, seconds: float, beating: str, *, is_echoed: bool = True) -> None:
        end, last = self.clock.now_s + seconds, self.clock.now_s
        while self.clock.now_s < end:
            self.clock.now_s += 0.1
            if self.clock.now_s - last >= self.pace.heartbeat_s:
                last = self.clock.now_s
                for node in beating:
                    self.machine.handle(events.Heartbeat(node, "1"))
                if is_echoed:
                    self.machine.handle(events.Heartbeat(SELF, INCARNATION))
            for instruction in self.machine.handle(events.Tick()):
                if isinstance(instruction, events.SendHeartbeat):
                    self.sent.append(instruction)
                if isinstance(instruction, events.EmitEvent) and isinstance(instruction.event, Lost):
                    self.lost[instruction.event.node] = self.clock.now_s


def test_another_address_is_told_once() -> None:
    """Others were told of devices that came only, and waited for minutes before they asked one again."""
    table = Table(is_quick=False)
    for port in (5000, 5001):
        places = (f"tcp://10.0.0.1:{port}",)
        announced = events.Announced("a", "1", "a", {}, {"key": "k", "places": list(places)})
        assert table.machine.handle(announced) == [events.EmitEvent(Joined(Member("a", "a", "1", {}, places)))]
        assert table.machine.handle(announced) == []


def test_a_frozen_device_is_lost_in_time_while_somebody_leads() -> None:
    table = Table(is_quick=True)
    table.go_on(10, "ab")
    frozen = table.clock.now_s
    table.go_on(10, "a")
    assert list(table.lost) == ["b"]
    assert table.lost["b"] - frozen <= 3.0


def test_slow_heartbeats_are_enough_when_idle() -> None:
    table = Table(is_quick=False)
    table.go_on(120, "ab")
    assert not table.lost
    table.go_on(60, "a")
    assert list(table.lost) == ["b"]


def test_a_silent_broker_costs_nobody_for_a_while() -> None:
    table = Table(is_quick=True)
    table.go_on(5, "ab")
    table.go_on(30, "", is_echoed=False)
    assert not table.lost
    table.go_on(5, "ab")
    assert not table.lost
    table.machine.handle(events.LinkChanged("a", True))
    table.go_on(100, "", is_echoed=False)
    assert list(table.lost) == ["b"], "the link says that a is there"


def test_a_will_and_a_broken_link_bring_the_end_near() -> None:
    for event in (events.Left("b", "1", True), events.LinkChanged("b", False, "cut")):
        table = Table(is_quick=False)
        table.machine.handle(events.LinkChanged("b", isinstance(event, events.LinkChanged)))
        table.go_on(25, "ab")
        told = table.clock.now_s
        table.machine.handle(event)
        table.go_on(5, "a")
        assert table.lost["b"] - told <= NEAR_S + 0.3


def test_a_will_of_somebody_who_came_back_is_nothing() -> None:
    table = Table(is_quick=False)
    table.go_on(25, "ab")
    table.machine.handle(events.Left("b", "1", True))
    table.machine.handle(events.Heartbeat("b", "1"))
    table.go_on(25, "ab")
    assert not table.lost


def test_sleeping_oneself_is_no_reason_to_lose_others() -> None:
    table = Table(is_quick=True)
    table.go_on(5, "ab")
    table.clock.now_s += 600
    table.go_on(5, "ab")
    assert not table.lost


def test_who_is_linked_to_the_leader_beats_as_if_nobody_led_and_says_so() -> None:
    table = Table(is_quick=True)
    table.go_on(12, "ab")
    assert len(table.sent) >= 9
    assert not any(heartbeat.is_rare for heartbeat in table.sent)
    table.sent.clear()
    assert table.machine.handle(events.LinkChanged("a", True)) == [events.SendHeartbeat(False, is_rare=True)]
    table.go_on(60, "ab")
    assert 5 <= len(table.sent) <= 7
    assert all(heartbeat.is_rare for heartbeat in table.sent)
    table.sent.clear()
    assert table.machine.handle(events.LinkChanged("a", False, "cut")) == [events.SendHeartbeat(False)]
    table.machine.handle(events.Heartbeat("a", "1"))
    table.go_on(12, "ab")
    assert len(table.sent) >= 9
    assert not table.lost, "its heartbeat was heard after the link broke"


def test_a_leader_beats_quickly_for_whoever_it_is_not_linked_to() -> None:
    table = Table(is_quick=True, holder=SELF)
    assert table.machine.handle(events.Tick()) == [events.SendHeartbeat(False)], "nobody was there before"
    assert table.machine.handle(events.LinkChanged("a", True)) == []
    assert table.machine.handle(events.LinkChanged("b", True)) == [events.SendHeartbeat(False, is_rare=True)]
    assert table.machine.handle(events.Announced("c", "1", "c", {}, {}))
    assert events.SendHeartbeat(False) in table.machine.handle(events.Tick())


def test_a_rare_heartbeat_is_waited_for_and_a_broken_link_ends_that() -> None:
    table = Table(is_quick=True, holder=SELF)
    table.machine.handle(events.LinkChanged("a", True))
    table.machine.handle(events.Heartbeat("b", "1", is_rare=True))
    table.go_on(25, "a")
    assert not table.lost, "it is linked to the leader, if not to us"
    table.go_on(10, "a")
    assert list(table.lost) == ["b"]
    cut = table.clock.now_s
    table.machine.handle(events.Heartbeat("a", "1", is_rare=True))
    table.machine.handle(events.LinkChanged("a", False, "cut"))
    table.go_on(5, "")
    assert table.lost["a"] - cut <= NEAR_S + 0.3


def test_a_newcomer_knows_whose_heartbeats_are_rare() -> None:
    table = Table(is_quick=True)
    table.machine.handle(events.Announced("c", "1", "c", {}, {}, is_rare=True))
    table.go_on(9, "ab")
    assert not table.lost


def test_a_silent_broker_costs_nobody_while_heartbeats_are_rare() -> None:
    table = Table(is_quick=True)
    table.machine.handle(events.LinkChanged("a", True))
    table.go_on(5, "ab")
    table.go_on(30, "", is_echoed=False)
    assert not table.lost


def test_a_doubt_tells_soon_whether_one_is_deaf_also_while_heartbeats_are_rare() -> None:
    for is_echoed in (True, False):
        table = Table(is_quick=True)
        table.machine.handle(events.LinkChanged("a", True))
        table.machine.handle(events.Heartbeat(SELF, INCARNATION))
        assert table.machine.is_rare
        assert table.machine.handle(events.Doubted()) == [events.SendHeartbeat(False, is_rare=True)]
        assert table.machine.handle(events.Doubted()) == [], "one at a time"
        if is_echoed:
            table.machine.handle(events.Heartbeat(SELF, INCARNATION))
        table.go_on(1.2, "", is_echoed=False)
        assert table.machine.is_hearing == is_echoed
        assert not table.lost


def waits_between_connections(*, is_quick: bool, n_connections: int) -> list[float]:
    """Return how long after each connection a device that never hears itself makes the next one."""
    clock = Clock(100.0)
    machine = Membership(SELF, INCARNATION, clock)
    if is_quick:
        machine.handle(events.HolderChanged("a"))
    waits: list[float] = []
    for _ in range(n_connections):
        machine.handle(events.BrokerChanged(True))
        connected_s = clock.now_s
        while not any(isinstance(one, events.Reconnect) for one in machine.handle(events.Tick())):
            clock.now_s += 0.1
            assert clock.now_s - connected_s < 2 * LONGEST_PATIENCE_S
        waits.append(clock.now_s - connected_s)
        machine.handle(events.BrokerChanged(False))
    return waits


@pytest.mark.parametrize("is_quick", [False, True])
def test_who_does_not_hear_itself_connects_anew_and_ever_more_rarely(is_quick: bool) -> None:
    waits = waits_between_connections(is_quick=is_quick, n_connections=10)
    assert waits[0] == pytest.approx(FIRST_PATIENCE_S, abs=0.2)
    assert all(later > earlier - 0.2 for earlier, later in itertools.pairwise(waits))
    assert waits[-1] == pytest.approx(LONGEST_PATIENCE_S, abs=0.2)


@pytest.mark.parametrize("is_quick", [False, True])
def test_who_hears_itself_no_more_connects_anew_soon(is_quick: bool) -> None:
    clock = Clock(100.0)
    machine = Membership(SELF, INCARNATION, clock)
    machine.handle(events.HolderChanged("a" if is_quick else None))
    machine.handle(events.BrokerChanged(True))
    for _ in range(200):  # all is well, but for the first heartbeat, which is lost
        clock.now_s += 0.5
        done = machine.handle(events.Tick())
        assert not any(isinstance(one, events.Reconnect) for one in done)
        if any(isinstance(one, events.SendHeartbeat) for one in done):
            machine.handle(events.Heartbeat(SELF, INCARNATION))
    pace, deaf_s = QUICK if is_quick else IDLE, clock.now_s
    while not any(isinstance(one, events.Reconnect) for one in machine.handle(events.Tick())):
        clock.now_s += 0.1
        assert clock.now_s - deaf_s < pace.heartbeat_s + FIRST_PATIENCE_S + 2


def test_whoever_begins_to_lead_does_not_wait_for_heartbeats_that_were_rare_before() -> None:
    table = Table(is_quick=True)
    for node in "ab":
        table.machine.handle(events.Heartbeat(node, "1", is_rare=True))
    began = table.clock.now_s
    table.machine.handle(events.HolderChanged(SELF))
    table.machine.handle(events.Heartbeat("a", "1", is_rare=True))
    table.go_on(5, "")
    assert list(table.lost) == ["b"], "who is there says at once that its heartbeats are rare still"
    assert table.lost["b"] - began <= QUICK.heartbeat_s + QUICK.lost_s + 0.3, "from when it hears itself"


def test_heartbeats_come_at_once_when_another_leads() -> None:
    table = Table(is_quick=True)
    table.machine.handle(events.LinkChanged("a", True))
    assert table.machine.handle(events.HolderChanged("b")) == [events.SendHeartbeat(False)]
    assert table.machine.handle(events.HolderChanged("b")) == []
    table.machine.handle(events.LinkChanged("b", True))
    assert table.machine.handle(events.HolderChanged("a")) == [events.SendHeartbeat(False, is_rare=True)]


def test_without_a_broker_one_who_cannot_be_linked_is_lost_soon() -> None:
    for is_up in (True, False):
        table = Table(is_quick=True)
        table.go_on(1.5, "ab")
        table.machine.handle(events.BrokerChanged(is_up))
        table.machine.handle(events.Heartbeat(SELF, INCARNATION))
        table.machine.handle(events.LinkChanged("a", False, "does not answer"))
        table.go_on(NEAR_S + 0.3, "", is_echoed=is_up)
        assert list(table.lost) == ([] if is_up else ["a"])
