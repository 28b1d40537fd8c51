"""Epochs that a member makes up: however it chooses them, and however far clocks are apart, somebody leads soon."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clock import Clock
from edge_run.base.errors import ProtocolError
from edge_run.devices.members.cluster import found_cluster
from edge_run.devices.members.identity import make_identity
from edge_run.devices.members.keys import DeviceKey
from edge_run.devices.messages.envelope import CLOCK_TOLERANCE_S, MOST_NUMBER, Gate, Writer
from edge_run.devices.messages.topics import Topic
from edge_run.devices.presence.lease import (
    BALLOT_BITS,
    EpochHeard,
    Heard,
    Lease,
    LeaseTick,
    Say,
    Wanted,
    Withdrawn,
    most_epoch,
)

DEVICE = DeviceKey(bytes(range(32)))
CLUSTER = found_cluster(DEVICE, "one", "mqtt://host")
TOPIC = Topic(CLUSTER.id, "lease")


class Node:
    """A lease behind a gate, with a clock of its own that is off by `skew_s`."""

    def __init__(self, clock: Clock, skew_s: float, seed: int) -> None:
        self.clock, self.skew_s = clock, skew_s
        self.identity = make_identity(self.wall, DEVICE)
        self.writer, self.gate = Writer(self.identity, CLUSTER, self.wall), Gate(CLUSTER, self.wall)
        self.lease = Lease(self.identity.node, clock, Random(seed))

    def wall(self) -> float:
        return self.clock.now_s + self.skew_s

    def take(self, payload: bytes, *, is_kept: bool = False) -> list[bytes]:
        with contextlib.suppress(ProtocolError):
            heard = self.gate.open(TOPIC, payload, is_kept=is_kept)
            return self.obey(self.lease.handle(Heard(heard.node, heard.epoch, str(heard.body["state"]), is_kept)))
        return []

    def hear_status(self, topic: Topic, payload: bytes) -> list[bytes]:
        """Nobody is taken for absent because of the epoch that he heard of."""
        return self.obey(self.lease.handle(EpochHeard(self.gate.open(topic, payload).epoch)))

    def obey(self, done: Sequence[object]) -> list[bytes]:
        said = [self.say(one.epoch, one.state) for one in done if isinstance(one, Say)]
        if any(isinstance(one, Withdrawn) for one in done):  # who led wants to lead again
            said += self.obey(self.lease.handle(Wanted()))
        return said

    def say(self, epoch: int, state: str) -> bytes:
        return self.writer.seal(TOPIC, epoch, {"state": state})[0]

    def status(self) -> tuple[Topic, bytes]:
        topic = Topic(CLUSTER.id, "status", self.identity.node)
        return topic, self.writer.seal(topic, self.lease.epoch, {"state": "here"})[0]


@settings(max_examples=30, deadline=None)
@given(
    st.floats(0, 3.9e9),
    st.lists(st.floats(0, CLOCK_TOLERANCE_S - 1), min_size=3, max_size=3),
    st.sampled_from(["most", "fastest", "slowest", "honest"]),
    st.integers(0, 1000),
)
def test_a_made_up_epoch_keeps_nobody_from_leading_for_long(
    start_s: float, skews_s: list[float], how: str, seed: int
) -> None:
    clock = Clock(start_s)
    nodes = [Node(clock, skew_s, seed + i) for i, skew_s in enumerate(skews_s)]
    liar = Node(clock, max(skews_s), seed)
    extreme = {"fastest": max(skews_s), "slowest": min(skews_s), "honest": -CLOCK_TOLERANCE_S}
    epoch = MOST_NUMBER - 1 if how == "most" else most_epoch(start_s + extreme[how] + CLOCK_TOLERANCE_S)
    lie, wanting = liar.say(epoch, "free"), nodes[seed % 3]
    kept = lie
    mail = [lie]
    mail += wanting.obey(wanting.lease.handle(Wanted()))
    apart_s = max(skews_s) - min(*skews_s, 0.0)  # with who comes late, whose clock is right
    for moment in range(int((apart_s + 8) / 0.1)):
        clock.now_s += 0.1
        sent, mail = mail, []
        for payload in sent:
            kept = payload
            for node in nodes:
                mail += node.take(payload)
        for node in nodes:
            mail += node.obey(node.lease.handle(LeaseTick()))
            if moment % 12 == 0:
                status = node.status()
                mail += [word for other in nodes for word in other.hear_status(*status)]
    assert wanting.lease.held
    assert all(node.lease.obeys(wanting.identity.node, wanting.lease.held) for node in nodes)
    late = Node(clock, min(skews_s), seed)  # starts now, and hears what the broker kept
    late.take(kept, is_kept=True)
    late.take(lie, is_kept=True)
    assert late.lease.epoch == wanting.lease.held


def test_epochs_have_room_for_a_long_time() -> None:
    at_2060_s = 2.84e9
    assert most_epoch(at_2060_s) < MOST_NUMBER
    assert most_epoch(0) >> BALLOT_BITS >= 1 << 24, "clocks that begin in 1970 have room too"


def test_which_epochs_are_let_in() -> None:
    clock = Clock(1.8e9)
    node, other = Node(clock, 0, 1), Node(clock, 0, 2)
    most = most_epoch(clock.now_s + CLOCK_TOLERANCE_S)
    assert node.gate.open(TOPIC, other.say(most, "free")).epoch == most
    assert node.gate.open(TOPIC, other.say(most + 1, "free")).epoch == 0, "by another clock it can be, by ours not yet"
    for epoch in (most_epoch(clock.now_s + 2 * CLOCK_TOLERANCE_S) + 1, MOST_NUMBER - 1):
        with pytest.raises(ProtocolError, match="says epoch"):
            node.gate.open(TOPIC, other.say(epoch, "free"))
