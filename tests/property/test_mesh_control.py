"""Control messages: what is forged, replayed, reordered, oversized or truncated is never let in."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clock import Clock
from edge_run.base.errors import NotTrusted, ProtocolError
from edge_run.base.strict_json import MOST_DIGITS
from edge_run.devices.members.cluster import found_cluster
from edge_run.devices.members.identity import Identity, make_identity
from edge_run.devices.members.keys import DeviceKey
from edge_run.devices.members.member_list import canonical
from edge_run.devices.messages import envelope as mesh_envelope
from edge_run.devices.messages.envelope import CLOCK_TOLERANCE_S, Gate, StaleClock, Writer
from edge_run.devices.messages.topics import Topic, parse_topic, subscriptions
from mesh_lists import Members

MEMBERS = Members("mqtt://host", spare=4, now_s=1.7e9)
CLUSTER, DEVICE = MEMBERS.cluster, MEMBERS.devices[0]
OTHER = found_cluster(DeviceKey(bytes(32)), "other", "mqtt://host")
LARGEST = 10**MOST_DIGITS - 1  # that is read: a sign is no digit
INTEGERS = st.integers(-LARGEST, LARGEST)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
REFUSED = (NotTrusted, ProtocolError)


def parties() -> tuple[Clock, Identity, Writer, Gate, Topic]:
    clock = Clock(1.7e9)
    identity = make_identity(clock, DEVICE)
    return (
        clock,
        identity,
        Writer(identity, CLUSTER, clock),
        Gate(CLUSTER, clock),
        Topic(CLUSTER.id, "load", identity.node),
    )


@example({"": -LARGEST})
@given(st.dictionaries(st.text(max_size=8), st.none() | st.booleans() | INTEGERS | FLOATS | st.text()))
def test_what_a_member_says_is_understood(body: dict[str, object]) -> None:
    _, identity, writer, gate, topic = parties()
    payload, count = writer.seal(topic, 7, body)  # type: ignore[arg-type]
    envelope = gate.open(topic, payload)
    assert (envelope.node, envelope.incarnation, envelope.count, envelope.epoch) == (
        identity.node,
        identity.incarnation,
        count,
        7,
    )
    assert canonical(envelope.body) == canonical(body)


@settings(max_examples=300)
@given(st.data())
def test_any_changed_byte_is_refused(data: st.DataObject) -> None:
    _, _, writer, gate, topic = parties()
    payload = bytearray(writer.seal(topic, 1, {"word": "x" * 20})[0])
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(REFUSED):
        gate.open(topic, bytes(payload))
    assert not gate._senders


@given(st.binary(max_size=2000), st.booleans())
def test_noise_and_pieces_are_refused(noise: bytes, is_piece: bool) -> None:
    _, _, writer, gate, topic = parties()
    payload = writer.seal(topic, 1, {})[0]
    with pytest.raises(REFUSED):
        gate.open(topic, payload[: len(noise) % len(payload)] if is_piece else noise)


def test_another_topic_another_owner_another_cluster() -> None:
    clock, identity, writer, gate, topic = parties()
    payload = writer.seal(topic, 1, {})[0]
    foreign = Topic(CLUSTER.id, "load", make_identity(clock, DEVICE).node)
    for other in (Topic(CLUSTER.id, "caps", identity.node), foreign):
        with pytest.raises(NotTrusted):
            gate.open(other, payload)
    with pytest.raises(NotTrusted, match="speaks for"):
        gate.open(foreign, writer.seal(foreign, 1, {})[0])
    with pytest.raises(NotTrusted, match="secret"):
        Gate(OTHER, clock).open(topic, payload)
    assert gate.open(topic, payload).node == identity.node


def test_who_knows_the_secret_and_is_no_member_is_refused() -> None:
    """Nor is who says that it runs on the device of a member."""
    clock, identity, writer, gate, topic = parties()
    outsider = make_identity(clock)
    own = Topic(CLUSTER.id, "load", outsider.node)
    with pytest.raises(NotTrusted, match="is no member"):
        gate.open(own, Writer(outsider, CLUSTER, clock).seal(own, 1, {})[0])
    for certificate in (outsider.certificate, identity.certificate, outsider.device.sign(b"any")):
        posing = dataclasses.replace(outsider, device=DEVICE, certificate=certificate)
        with pytest.raises(NotTrusted, match="did not sign for it"):
            gate.open(own, Writer(posing, CLUSTER, clock).seal(own, 1, {})[0])
    assert not gate._senders
    assert gate.open(topic, writer.seal(topic, 1, {})[0]).node == identity.node


def test_replays_and_old_incarnations() -> None:
    clock, identity, writer, gate, topic = parties()
    first, second = writer.seal(topic, 1, {})[0], writer.seal(topic, 1, {})[0]
    gate.open(topic, second)
    for payload in (first, second):
        with pytest.raises(NotTrusted, match="again, or late"):
            gate.open(topic, payload)
    clock.now_s += 1
    reborn = dataclasses.replace(identity, incarnation=make_identity(clock).incarnation)
    gate.open(topic, Writer(reborn, CLUSTER, clock).seal(topic, 1, {})[0])
    with pytest.raises(NotTrusted, match="an incarnation that ended"):
        gate.open(topic, writer.seal(topic, 1, {})[0])


@pytest.mark.parametrize("skew_s", [-CLOCK_TOLERANCE_S - 5, CLOCK_TOLERANCE_S + 5])
def test_a_clock_that_is_off_is_named(skew_s: float) -> None:
    clock, _, writer, gate, topic = parties()
    clock.now_s += skew_s
    payload = writer.seal(topic, 1, {})[0]
    clock.now_s -= skew_s
    with pytest.raises(StaleClock) as caught:
        gate.open(topic, payload)
    assert caught.value.skew_s == pytest.approx(skew_s)
    with pytest.raises(StaleClock):
        gate.open(topic, payload, is_kept=True)


def test_what_the_broker_kept_may_be_old_where_epochs_decide() -> None:
    clock, _, writer, gate, _ = parties()
    lease = Topic(CLUSTER.id, "lease")
    payload = writer.seal(lease, 5, {"state": "hold"})[0]
    clock.now_s += 1e6
    with pytest.raises(StaleClock):
        gate.open(lease, payload)
    assert gate.open(lease, payload, is_kept=True).epoch == 5


def test_a_will_counts_once_and_for_the_present_connection_only() -> None:
    clock, identity, writer, gate, _ = parties()
    status = Topic(CLUSTER.id, "status", identity.node)
    old_will, old = writer.seal(status, 0, {"state": "will"})
    gate.open(status, writer.seal(status, 0, {"state": "here", "session": old})[0])
    will, session = writer.seal(status, 0, {"state": "will"})
    gate.open(status, writer.seal(status, 0, {"state": "here", "session": session})[0])
    clock.now_s += 1e5  # wills are written when the connection begins
    with pytest.raises(NotTrusted, match="a connection that ended"):
        gate.open(status, old_will)
    assert gate.open(status, will).body == {"state": "will"}
    with pytest.raises(NotTrusted):
        gate.open(status, will)


def test_a_member_that_signs_nonsense() -> None:
    clock, identity, writer, gate, topic = parties()
    fields = {"incarnation": identity.incarnation, "count": 1, "epoch": 0, "time_ms": int(clock() * 1e3)}
    fields |= {"list": list(CLUSTER.version), "body": {}}

    def sealed(content: bytes) -> bytes:
        return writer._head + identity.sign(mesh_envelope._signed(topic, writer._head, content)) + content

    wrong = [
        b"",
        b"[]",
        b"{" * 5000,
        b"[" * 100_000,
        json.dumps(fields).encode(),  # not canonical
        canonical(fields).replace(b'"count":1', b'"count":1,"count":2'),
        canonical(fields | {"count": -1}),
        canonical(fields | {"count": 1.5}),
        canonical(fields | {"count": True}),
        canonical(fields | {"epoch": 1 << 60}),
        canonical(fields | {"incarnation": "short"}),
        canonical(fields | {"body": []}),
        canonical(fields | {"more": 1}),
        canonical(fields).replace(b"{}", b'{"x":NaN}'),
        b"\xff\xfe" + canonical(fields),
    ]
    for content in wrong:
        with pytest.raises(ProtocolError, match=r"malformed|bytes, not"):
            gate.open(topic, sealed(content))
    assert not gate._senders
    assert gate.open(topic, sealed(canonical(fields))).body == {}
    with pytest.raises(ProtocolError, match="no JSON"):
        writer.seal(topic, 0, {"x": float("inf")})
    with pytest.raises(ProtocolError, match="at most"):
        writer.seal(topic, 0, {"x": "x" * mesh_envelope.MOST_BYTES})


def test_a_thousand_attacks_and_bounded_memory() -> None:
    """Forged, replayed, reordered, oversized, truncated, from nobodies: none of a thousand gets in."""
    clock, _, writer, gate, topic = parties()
    chance = random.Random(6)
    genuine = [writer.seal(topic, 1, {"number": number})[0] for number in range(50)]
    for payload in genuine[::2]:
        gate.open(topic, payload)
    accepted = list[bytes]()
    stranger = Writer(make_identity(clock, DEVICE), OTHER, clock)
    for number in range(1000):
        payload = bytearray(chance.choice(genuine))
        kind = number % 5
        if kind == 0:
            payload[chance.randrange(len(payload))] ^= 1 << chance.randrange(8)
        elif kind == 1:
            pass  # as it was: replayed, or late
        elif kind == 2:
            payload += bytes(mesh_envelope.MOST_BYTES)
        elif kind == 3:
            del payload[chance.randrange(len(payload)) :]
        else:
            payload = bytearray(stranger.seal(topic, 1, {})[0])
        try:
            gate.open(topic, bytes(payload))
            accepted.append(bytes(payload))
        except REFUSED:
            pass
    assert accepted in ([], [genuine[49]]), "the last one said, which is new, and once"
    assert len(gate._senders) == 1


def test_no_more_members_than_are_meant_to_be() -> None:
    clock, _, _, gate, _ = parties()

    devices = itertools.cycle([MEMBERS.founder, *MEMBERS.devices])

    def newcomer() -> None:
        identity = make_identity(clock, next(devices))
        topic = Topic(CLUSTER.id, "load", identity.node)
        gate.open(topic, Writer(identity, CLUSTER, clock).seal(topic, 0, {})[0])

    for _ in range(mesh_envelope.MOST_MEMBERS):
        newcomer()
    with pytest.raises(ProtocolError, match="one too many"):
        newcomer()
    clock.now_s += 3 * CLOCK_TOLERANCE_S
    newcomer()
    assert len(gate._senders) == 1


@pytest.mark.parametrize("kind", ["status", "caps", "load", "cmd", "rsp", "lease", "plan", "members", "join"])
def test_topics_are_read_as_they_are_written(kind: str) -> None:
    owner = None if kind in ("lease", "plan", "members") else "a" * 16
    topic = Topic("a" * 8, kind, owner, 12 if kind == "plan" else 0)
    assert parse_topic(str(topic)) == topic


def nearly(kind: str, at: int, letter: str) -> str:
    """Return a topic with a letter too many, or without its end."""
    text = str(Topic("a" * 8, kind, "b" * 16))
    return text[: at % len(text)] + (letter and letter + text[at % len(text) :])


NEARLY = st.builds(
    nearly,
    st.sampled_from(["status", "caps", "load", "cmd", "rsp", "lease", "members", "join"]),
    st.integers(0, 200),
    st.characters() | st.sampled_from(["", "/", "a", "\n"]),
)


@given(st.text(max_size=60) | NEARLY)
def test_other_topics_are_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        parse_topic(text)


@pytest.mark.parametrize(
    "epoch", ["\N{ARABIC-INDIC DIGIT ONE}", "\N{FULLWIDTH DIGIT SEVEN}", "007", "-1", "", "1" * 17]
)
def test_a_plan_has_one_topic(epoch: str) -> None:
    with pytest.raises(ProtocolError):
        parse_topic(f"edge/v1/{'a' * 8}/plan/{epoch}")


def test_subscriptions_are_of_this_cluster() -> None:
    member, watcher = (subscriptions("cluster1", "n", is_watching=is_watching) for is_watching in (False, True))
    assert all(topic.startswith("edge/v1/cluster1/") for topic in watcher)
    assert set(watcher) - set(member) == {"edge/v1/cluster1/node/+/load"}, "who computes has no use for others' loads"
