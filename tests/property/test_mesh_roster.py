"""The list of members among devices that hear each other late, twice or never: it never goes back, and all agree."""

from __future__ import annotations

import random
import secrets

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from edge_run.base.errors import NotTrusted, ProtocolError
from edge_run.devices.members.cluster import Cluster, found_cluster
from edge_run.devices.members.identity import Identity, make_identity
from edge_run.devices.members.join_request import ask
from edge_run.devices.members.keys import DeviceKey, node_of
from edge_run.devices.members.list_changes import ListEditor, take_over
from edge_run.devices.members.member_list import Invitation
from edge_run.devices.members.roster import LEARN_S, MOST_WAITING, SAY_WITHIN_S, Roster
from edge_run.devices.messages.envelope import MOST_OF_DEVICE, Gate, Writer
from edge_run.devices.messages.topics import Topic
from mesh_lists import let_in

START_S = 1.8e9
ROLE_CHANGES = [("2", "use"), ("2", "compute"), ("2", "lead"), ("3", "use"), ("3", "lead")]


def lasting() -> Identity:
    key = DeviceKey(secrets.token_bytes(32))
    return Identity(key.node, f"{int(START_S):012x}{0:08x}", True, key, b"", key)


def member_cluster(founder: Identity, names: list[Identity]) -> Cluster:
    """A cluster of `founder` with all of `names` in it."""
    cluster = found_cluster(founder.device, "0", "mqtt://host")
    listed = cluster.listed
    for number, identity in enumerate(names):
        listed = let_in(ListEditor(founder.device, listed, cluster.secret), identity.device, f"{number + 1}", START_S)
    return cluster.adopt(listed, founder.device)


class Lists(RuleBasedStateMachine):
    """Four devices, of which two may change the list; what they say is heard in any order, or lost."""

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        self.clock, self.random = [0.0], random.Random(seed)
        self.devices = [lasting() for _ in range(4)]
        cluster = member_cluster(self.devices[0], self.devices[1:])
        listed = ListEditor(self.devices[0].device, cluster.listed, cluster.secret).change_role("1", "lead")
        self.rosters = [self._roster(one, cluster.adopt(listed, one.device)) for one in self.devices]
        self.known = [one.listed.order for one in self.rosters]
        self.air: list[bytes] = []
        self.sent_away: set[tuple[int, str]] = set()

    def _roster(self, identity: Identity, cluster: Cluster) -> Roster:
        return Roster(
            identity,
            cluster,
            lambda: self.clock[0],
            lambda: START_S + self.clock[0],
            random.Random(self.random.random()),
        )

    @rule(by=st.integers(0, 1), what=st.sampled_from(["rotate", "remove", "role", "hand on"]))
    def change(self, by: int, what: str) -> None:
        roster = self.rosters[by]
        try:
            editor = ListEditor(self.devices[by].device, roster.listed, roster.cluster.secret)
            if what == "rotate":
                changed = editor.rotate(bytes([self.random.randrange(256)]) * 32)
            elif what == "remove":
                name = self.random.choice("123")
                changed = editor.remove(name)
                self.sent_away.add((by, self.devices[int(name)].node))
            elif what == "hand on":
                changed = editor.hand_on(self.random.choice("23"))
            else:
                changed = editor.change_role(*self.random.choice(ROLE_CHANGES))
        except NotTrusted:
            return
        assert roster.take(changed.payload)
        roster.say()

    @rule(who=st.integers(0, 3))
    def connect(self, who: int) -> None:
        self.rosters[who].connect()

    @rule(who=st.integers(0, 3), which=st.integers(0, 1 << 16))
    def hear(self, who: int, which: int) -> None:
        if self.air:  # what is drawn may not depend on it: keys are new in every run, and so is the order of lists
            self.rosters[who].take(self.air[which % len(self.air)])

    @rule(who=st.integers(0, 3), of=st.integers(0, 3))
    def hear_version(self, who: int, of: int) -> None:
        self.rosters[who].hear(self.rosters[of].cluster.version)

    @rule(step_s=st.floats(0.01, 2.0))
    def wait(self, step_s: float) -> None:
        self.clock[0] += step_s
        for roster in self.rosters:
            roster.pass_time()

    @invariant()
    def nothing_goes_back(self) -> None:
        for number, roster in enumerate(getattr(self, "rosters", ())):
            roster.check()
            self.air += roster.said
            roster.said.clear()
            assert roster.listed.order >= self.known[number], "an older list was taken for a newer one"
            self.known[number] = roster.listed.order
        self.who_was_removed_stays_so()

    def who_was_removed_stays_so(self) -> None:
        """With whoever removed it, and may still do so, at any moment; and in the end with all. But who leads stays."""
        for by, node in sorted(getattr(self, "sent_away", ())):
            listed = self.rosters[by].listed
            charter = listed.charter
            if node in {node_of(key) for key in (charter.founder, charter.heir, *charter.leads) if key}:
                self.sent_away.discard((by, node))
            elif listed.may_sign(self.devices[by].public_key):
                assert node not in {one.node for one in listed.roll.members}, "its removal was undone"

    def teardown(self) -> None:
        if not hasattr(self, "rosters"):
            return
        for _ in range(12):  # all hear each other: soon they agree
            for roster in self.rosters:
                for other in self.rosters:
                    roster.hear(other.cluster.version)
            self.clock[0] += SAY_WITHIN_S + LEARN_S
            for roster in self.rosters:
                roster.pass_time()
            said = [payload for roster in self.rosters for payload in roster.said]
            for roster in self.rosters:
                roster.said.clear()
                for payload in said:
                    roster.take(payload)
        versions = {roster.cluster.version for roster in self.rosters}
        assert len(versions) == 1, versions
        self.who_was_removed_stays_so()
        members = [one for one in self.rosters if one.is_member]
        assert len({one.cluster.secret for one in members}) == 1
        gates = [Gate(one.cluster, lambda: START_S) for one in members]
        for identity, roster in zip(self.devices, self.rosters, strict=True):
            topic = Topic(roster.cluster.id, "load", identity.node)
            payload, _ = Writer(identity, roster.cluster, lambda: START_S).seal(topic, 0, {})
            for gate in gates:
                if roster.is_member:
                    gate.open(topic, payload)
                else:
                    with pytest.raises(NotTrusted):
                        gate.open(topic, payload)


Lists.TestCase.settings = settings(max_examples=100, stateful_step_count=12, deadline=None)
TestLists = Lists.TestCase


def rosters() -> tuple[list[float], Identity, Identity, Cluster]:
    clock = [0.0]
    founder, other = lasting(), lasting()
    return clock, founder, other, member_cluster(founder, [other])


def test_nothing_is_believed_before_the_list_that_is_kept_was_heard() -> None:
    clock, founder, other, cluster = rosters()
    roster = Roster(other, cluster, lambda: clock[0], lambda: START_S, random.Random(1))
    assert not roster.is_settled
    roster.connect()
    roster.take(cluster.listed.payload)
    assert roster.is_settled, "it has what the broker keeps"
    roster.connect()
    roster.pass_time()
    assert not roster.is_settled
    roster.hear_self()
    assert roster.is_settled, "the broker keeps none, or it would have come before"
    roster.connect()
    clock[0] += LEARN_S
    roster.pass_time()
    assert roster.is_settled, "nothing comes"
    newer = ListEditor(founder.device, cluster.listed, cluster.secret).rotate(bytes(32))
    assert roster.hear(newer.version)
    roster.hear_self()
    assert not roster.is_settled, "there is a newer one"
    assert not roster.hear((1 << 40, 0, 0, 0)), "whoever says so all the time holds up nobody"
    assert roster.take(newer.payload)
    assert roster.is_settled
    assert roster.cluster.secret == bytes(32)


def test_who_is_handed_the_cluster_takes_it_though_another_program_heard_that_first() -> None:
    """As `mesh status`, which keeps the list: `mesh join` then hears from the broker what it has already."""
    clock, founder, other, cluster = rosters()
    handed = ListEditor(founder.device, cluster.listed, cluster.secret).hand_on("1")
    roster = Roster(other, cluster.adopt(handed, other.device), lambda: clock[0], lambda: START_S, random.Random(1))
    roster.pass_time()
    assert roster.listed == handed, "there may be a newer one"
    roster.connect()
    assert not roster.take(handed.payload)
    assert roster.pass_time() == (True, [])
    assert roster.listed.charter.founder == other.public_key
    assert roster.said == [roster.listed.payload]


def test_who_handed_the_cluster_on_hands_it_to_nobody_else() -> None:
    """Nor does whoever has the founder's key: the cluster was handed on since."""
    founder, heir, another, later = (lasting() for _ in range(4))
    cluster = member_cluster(founder, [heir, another, later])
    editor = ListEditor(founder.device, cluster.listed, cluster.secret)
    taken, forged = (take_over(editor.hand_on(name), one.device) for name, one in (("1", heir), ("2", another)))
    assert taken
    assert forged
    while forged.order < taken.order:
        forged = ListEditor(another.device, forged, cluster.secret).rotate(bytes(32))
    roster = Roster(founder, cluster, lambda: 0.0, lambda: START_S, random.Random(1))
    assert roster.take(taken.payload)
    with pytest.raises(NotTrusted, match="did not hand the cluster on"):
        roster.take(forged.payload)
    assert roster.listed == taken
    again = take_over(ListEditor(heir.device, taken, cluster.secret).hand_on("3"), later.device)
    assert again
    assert roster.take(again.payload)


def test_who_asks_is_bounded_and_let_in_by_one() -> None:
    clock, founder, other, cluster = rosters()
    guest = DeviceKey(secrets.token_bytes(32))
    invitation = Invitation(guest.public_key, guest.seal_key, "use", 3, int(START_S) + 100)
    listed = ListEditor(founder.device, cluster.listed, cluster.secret).invite(invitation, START_S)
    cluster = cluster.adopt(listed, founder.device)
    roster = Roster(founder, cluster, lambda: clock[0], lambda: START_S, random.Random(1))
    watching = Roster(
        make_identity(lambda: START_S, founder.device), cluster, lambda: 0.0, lambda: START_S, random.Random(1)
    )
    user = Roster(other, cluster.adopt(listed, other.device), lambda: 0.0, lambda: START_S, random.Random(1))
    for _ in range(2 * MOST_WAITING):
        payload = ask(guest, DeviceKey(secrets.token_bytes(32)), cluster.id, "one", START_S)
        for one in (roster, watching, user):
            one.ask(payload)
            one.check()
    with pytest.raises(NotTrusted):
        roster.ask(ask(DeviceKey(bytes(range(32))), guest, cluster.id, "one", START_S))
    with pytest.raises(ProtocolError):
        roster.ask(b"{}")
    is_changed, refused = roster.pass_time()
    assert is_changed
    assert len(refused) == MOST_WAITING - 3
    assert len(roster.listed.roll.members) == 5
    for one in (watching, user):
        assert one.pass_time() == (False, []), "only the founder's own node, or a leading one, lets in"


def test_one_device_has_so_many_nodes_and_others_have_places_left() -> None:
    _, founder, other, cluster = rosters()
    gate = Gate(cluster, lambda: START_S)

    def speak(device: Identity) -> None:
        node = make_identity(lambda: START_S, device.device)
        topic = Topic(cluster.id, "load", node.node)
        gate.open(topic, Writer(node, cluster, lambda: START_S).seal(topic, 0, {})[0])

    for _ in range(MOST_OF_DEVICE):
        speak(other)
    with pytest.raises(ProtocolError, match="of its device"):
        speak(other)
    speak(founder)


def test_a_secret_that_was_changed_is_good_for_a_moment_longer() -> None:
    wall = [START_S]
    _, founder, other, cluster = rosters()
    newer = cluster.adopt(ListEditor(founder.device, cluster.listed, cluster.secret).rotate(bytes(32)), founder.device)
    gate = Gate(cluster, lambda: wall[0])
    topic = Topic(cluster.id, "load", other.node)
    late = Writer(other, cluster.adopt(cluster.listed, other.device), lambda: wall[0])
    assert gate.adopt(newer) == []
    gate.open(topic, late.seal(topic, 0, {})[0])
    for later_s in (31, -3600):  # the clock may be put back
        assert gate.adopt(cluster) == gate.adopt(newer) == []
        wall[0] += later_s
        with pytest.raises(NotTrusted, match="secret"):
            gate.open(topic, late.seal(topic, 0, {})[0])
