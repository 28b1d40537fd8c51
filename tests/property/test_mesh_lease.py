"""The lease: two may believe to lead, with two epochs; nobody obeys both, whatever becomes of messages and nodes."""

from __future__ import annotations

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from clock import Clock
from edge_run.devices.presence.lease import (
    EXPIRES_S,
    Connected,
    EpochHeard,
    Heard,
    HolderLost,
    Lease,
    LeaseTick,
    Say,
    Unwanted,
    Wanted,
    Withdrawn,
)

NAMES = ("a", "b", "c")
NODES = st.sampled_from(NAMES)


class Cluster(RuleBasedStateMachine):
    """Three nodes that all may lead, and a broker that does what it likes with messages."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.random = Clock(100.0), Random(1)
        self.nodes = {name: Lease(name, self.clock, self.random) for name in NAMES}
        self.mail: list[tuple[str, Heard]] = []
        self.kept: Heard | None = None
        self.granted: dict[int, str] = {}
        self.last_grant = dict.fromkeys(NAMES, 0)
        self.obeyed: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.stolen: list[tuple[str, int]] = []  # orders on their way

    def feed(self, name: str, event: object) -> None:
        known, held = self.nodes[name].epoch, self.nodes[name].held
        instructions = self.nodes[name].handle(event)  # type: ignore[arg-type]
        if (epoch := self.nodes[name].held) not in (0, held):
            assert epoch not in self.granted, "an epoch is somebody's, once"
            assert epoch > self.last_grant[name], "epochs only grow"
            assert epoch >= known, "and are later than all that was heard of"
            assert Say(epoch, "hold") in instructions, "others are told at once"
            self.granted[epoch] = name
            self.last_grant[name] = epoch
        for done in instructions:
            if isinstance(done, Say):
                heard = Heard(name, done.epoch, done.state)
                self.kept = heard
                self.mail += [(other, heard) for other in NAMES]
            else:
                assert isinstance(done, Withdrawn)
                assert self.nodes[name].held == 0

    @rule(name=NODES)
    def want(self, name: str) -> None:
        self.feed(name, Wanted())

    @rule(name=NODES)
    def give_back(self, name: str) -> None:
        self.feed(name, Unwanted())

    @rule(wait_s=st.sampled_from([0.05, 0.1, 0.25, 0.5, 1.2, EXPIRES_S + 1]))
    def wait(self, wait_s: float) -> None:
        self.clock.now_s += wait_s
        for name in NAMES:
            self.feed(name, LeaseTick())

    @rule()
    def deliver_all(self) -> None:
        mail, self.mail = self.mail, []
        for name, heard in mail:
            self.feed(name, heard)

    @rule(data=st.data(), is_doubled=st.booleans())
    def deliver_one(self, data: st.DataObject, is_doubled: bool) -> None:
        if self.mail:
            place = data.draw(st.integers(0, len(self.mail) - 1))
            name, heard = self.mail[place] if is_doubled else self.mail.pop(place)
            self.feed(name, heard)

    @rule(name=NODES)
    def echo(self, name: str) -> None:
        """Let a node hear itself, and nobody else hear it yet: the network is torn."""
        own = [heard for to, heard in self.mail if to == heard.node == name]
        self.mail = [(to, heard) for to, heard in self.mail if not to == heard.node == name]
        for heard in own:
            self.feed(name, heard)

    @rule(name=NODES)
    def lead_alone(self, name: str) -> None:
        """Let a node want to lead that hears nobody but itself for a while."""
        for event in (LeaseTick(), Wanted(), LeaseTick()):
            self.clock.now_s += 1.6
            self.feed(name, event)
            self.echo(name)
        self.clock.now_s += 0.3
        self.feed(name, LeaseTick())

    @rule(data=st.data())
    def lose_one(self, data: st.DataObject) -> None:
        if self.mail:
            self.mail.pop(data.draw(st.integers(0, len(self.mail) - 1)))

    @rule(name=NODES, other=NODES)
    def gossip(self, name: str, other: str) -> None:
        self.feed(name, EpochHeard(self.nodes[other].epoch))

    @rule(name=NODES, other=NODES)
    def lose_device(self, name: str, other: str) -> None:
        if name != other:
            self.feed(name, HolderLost(other))

    @rule(name=NODES)
    def connect(self, name: str) -> None:
        self.feed(name, Connected())

    @rule(name=NODES)
    def restart(self, name: str) -> None:
        self.nodes[name] = Lease(name, self.clock, self.random)
        self.obeyed[name] = self.last_grant[name] = 0
        self.mail = [(other, heard) for other, heard in self.mail if other != name]
        if self.kept is not None and self.kept.node != name:
            self.feed(name, Heard(self.kept.node, self.kept.epoch, self.kept.state, is_old=True))

    @rule(leader=NODES, worker=NODES)
    def order(self, leader: str, worker: str) -> None:
        if self.nodes[leader].held:
            self.stolen.append((leader, self.nodes[leader].held))
        if not self.stolen:
            return
        sender, epoch = self.stolen[self.random.randrange(len(self.stolen))]
        self.feed(worker, EpochHeard(epoch))
        if self.nodes[worker].obeys(sender, epoch):
            assert epoch >= self.obeyed[worker], "nobody obeys an earlier coordinator after a later one"
            self.obeyed[worker] = epoch

    @invariant()
    def check(self) -> None:
        held = [lease.held for lease in self.nodes.values() if lease.held]
        assert len(set(held)) == len(held), "two that lead have two epochs"
        for name, lease in self.nodes.items():
            lease.check()
            if lease.held:
                assert self.granted[lease.held] == name
            leaders = {(other, one.held) for other, one in self.nodes.items() if one.held}
            assert sum(lease.obeys(other, epoch) for other, epoch in leaders) <= 1


Cluster.TestCase.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
TestCluster = Cluster.TestCase


def test_without_trouble_the_first_who_wants_leads_soon_and_the_second_waits() -> None:
    clock = Clock(100.0)
    nodes = {name: Lease(name, clock, Random(2)) for name in NAMES}

    def settle(seconds: float) -> None:
        for _ in range(int(seconds / 0.05)):
            clock.now_s += 0.05
            said = [(name, done) for name in NAMES for done in nodes[name].handle(LeaseTick()) if isinstance(done, Say)]
            share(said)

    def share(said: list[tuple[str, Say]]) -> None:
        for name, word in said:
            for other in NAMES:
                share(
                    [(other, d) for d in nodes[other].handle(Heard(name, word.epoch, word.state)) if isinstance(d, Say)]
                )

    share([("a", done) for done in nodes["a"].handle(Wanted()) if isinstance(done, Say)])
    settle(0.5)
    first = nodes["a"].held
    assert first
    share([("b", done) for done in nodes["b"].handle(Wanted()) if isinstance(done, Say)])
    settle(20)
    assert (nodes["a"].held, nodes["b"].held) == (first, 0)
    share([("a", done) for done in nodes["a"].handle(Unwanted()) if isinstance(done, Say)])
    settle(1)
    assert nodes["b"].held > first
    assert {nodes[name].holder for name in NAMES} == {"b"}
    nodes["b"] = Lease("b", clock, Random(3))  # it dies without a word
    share([("c", done) for done in nodes["c"].handle(Wanted()) if isinstance(done, Say)])
    settle(EXPIRES_S + 2)
    assert nodes["c"].held > first
