"""The embedded broker's decisions, under whatever clients send, in whatever order."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_run.base.errors import ProtocolError
from edge_run.devices.broker.access import BrokerAccess, BrokerUser, covers, digest, is_filter, parse_access
from edge_run.devices.broker.broker import Close, MqttBroker, Send
from edge_run.devices.broker.kept import MOST, MOST_BYTES, MOST_BYTES_OF_USER, MOST_OF_USER, KeptMessages
from edge_run.devices.broker.packets import (
    Connect,
    PacketKind,
    Publish,
    Subscribe,
    Unsubscribe,
    Word,
    read_head,
    read_packet,
    write_packet,
    write_publish,
)
from mqtt_client import connect_packet, publish_packet, subscribe_packet, text

A = BrokerUser(digest("a"), ("t/+", "own/%c/#"), ("t/#", "own/%c"), 2)
B = BrokerUser(digest("b"), ("t/1",), ("t/1",), 1)
ACCESSES = (
    BrokerAccess({"a": A, "b": B}),
    BrokerAccess({"a": A}),
    BrokerAccess({"a": dataclasses.replace(A, password_sha256=digest("new")), "b": B}),
    BrokerAccess({"a": dataclasses.replace(A, subscribe=("t/1",)), "b": dataclasses.replace(B, most_bytes=1)}),
    BrokerAccess({}),
)
LEVELS = st.sampled_from(["t", "own", "1", "2", "a1", "b1", "bb", "+", "#", "$x", ""])
TEXTS = st.lists(LEVELS, min_size=1, max_size=4).map("/".join)
TOPICS = TEXTS.filter(lambda text: not set(text) & set("+#"))
NAMES = st.text("ab/", min_size=1, max_size=9).map(text)
CONTENTS = st.binary(max_size=64) | st.binary(max_size=2) | st.tuples(NAMES, st.binary(max_size=9)).map(b"".join)
MESSAGES = st.builds(Publish, TOPICS, st.binary(max_size=3), st.booleans(), st.booleans(), st.integers(1, 9))
PACKETS = st.one_of(
    st.builds(
        Connect,
        st.sampled_from(["a1", "b1", "bb", "", "c/d", "+"]),
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from([b"a", b"b", b"new"]),
        st.just(30),
        st.none() | MESSAGES,
        st.sampled_from([4, 4, 4, 5]),
    ),
    MESSAGES,
    st.builds(Subscribe, st.integers(1, 9), st.lists(st.tuples(TEXTS, st.booleans()), max_size=3).map(tuple)),
    st.builds(Unsubscribe, st.integers(1, 9), st.lists(TEXTS, max_size=3).map(tuple)),
    st.sampled_from([Word(PacketKind.PINGREQ), Word(PacketKind.DISCONNECT), Word(PacketKind.PUBACK)]),
)
EVENTS = st.one_of(st.tuples(st.integers(1, 5), PACKETS), st.integers(1, 5), st.sampled_from(ACCESSES))


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_nobody_hears_or_says_what_he_may_not(events: list[object]) -> None:
    access = ACCESSES[0]
    broker = MqttBroker(access)
    who: dict[int, tuple[str, str]] = {}  # the model: user and name of who is in
    for event in events:
        if isinstance(event, BrokerAccess):
            done, access = broker.set_access(event), event
        elif isinstance(event, int):
            done = broker.leave(event)
            who.pop(event, None)
        else:
            connection, packet = event  # type: ignore[misc]
            was_in = broker.is_in(connection)
            done = broker.take(connection, packet)
            if isinstance(packet, Connect) and not was_in and broker.is_in(connection):
                user_in = access.users[packet.user]
                assert user_in.has_password(packet.password)
                assert packet.will is None or len(packet.will.payload) <= user_in.most_bytes
                who[connection] = packet.user, packet.client
        broker.check()
        for one in done:
            if isinstance(one, Close):
                assert not broker.is_in(one.connection) or one.why, "who is closed without a word has been forgotten"
                who.pop(one.connection, None)
            elif one.data[0] >> 4 == PacketKind.PUBLISH:
                message = read_packet(one.data[0], one.data[2:] + one.payload)
                assert isinstance(message, Publish)
                user, client = who[one.connection]
                assert any(covers(own, message.topic, client or "auto") for own in access.users[user].subscribe)
        assert all(broker.is_in(one) for one in who)
        assert len(broker.kept) <= MOST


@st.composite
def widened(draw: st.DrawFn, text: str) -> str:
    """Filters that match what `text` does, a topic or a filter, but for topics that begin with `$`."""
    levels = [level if level == "#" else draw(st.sampled_from([level, "+"])) for level in text.split("/")]
    n_kept = draw(st.none() | st.integers(0, len(levels) - (levels[-1] == "#")))
    return "/".join(levels if n_kept is None else [*levels[:n_kept], "#"])


@settings(max_examples=300, deadline=None)
@given(st.data(), TEXTS.filter(is_filter))
def test_a_filter_covers_what_it_was_widened_from(data: st.DataObject, text: str) -> None:
    wide = data.draw(widened(text))
    assert covers(wide, text) is not (text.startswith("$") and wide.startswith(("+", "#")))


def test_what_a_filter_covers_it_matches() -> None:
    """Of all filters and topics of up to four levels."""
    levels = ["a", "$x", "", "+", "#"]
    texts = ["/".join(one) for n_levels in range(1, 5) for one in itertools.product(levels, repeat=n_levels)]
    filters = [text for text in texts if is_filter(text)]
    topics = [text for text in filters if not set(text) & set("+#")]
    matched = {one: {topic for topic in topics if covers(one, topic)} for one in filters}
    for wide, narrow in itertools.product(filters, repeat=2):
        if covers(wide, narrow):
            assert matched[narrow] <= matched[wide], (wide, narrow)


@pytest.mark.parametrize(
    ("wide", "narrow", "is_so"),
    [
        ("a/#", "a", True),
        ("a/#", "a/b/+", True),
        ("a/+", "a/#", False),
        ("a/+", "a/+", True),
        ("a/b", "a/+", False),
        ("+/b", "a/b", True),
        ("#", "$SYS/x", False),
        ("a/%c", "a/me", True),
        ("a/%c", "a/you", False),
        ("a/%c", "a/+", False),
        ("a", "a/b", False),
    ],
)
def test_filters(wide: str, narrow: str, is_so: bool) -> None:
    assert covers(wide, narrow, "me") is is_so


@settings(
    max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(first=st.integers(0, 255) | st.sampled_from([0x30, 0x31, 0x40, 0xC0, 0xE0]), content=CONTENTS)
def test_any_bytes_are_a_packet_or_refused(first: int, content: bytes, outcomes: Counter[str]) -> None:
    try:
        read_packet(first, content)
    except ProtocolError:
        outcomes["refused"] += 1
    else:
        outcomes["taken"] += 1
        assert first >> 4 in (1, 3, 4, 8, 10, 12, 14)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(kind=st.sampled_from(["connect", "publish", "subscribe"]), place=st.integers(0, 80), byte=st.integers(0, 255))
def test_any_spoiled_packet_is_a_packet_or_refused(kind: str, place: int, byte: int, outcomes: Counter[str]) -> None:
    packet = bytearray(
        {
            "connect": connect_packet("me", "user", "password", will="t/1"),
            "publish": publish_packet("t/1", b"x" * 20, number=3),
            "subscribe": subscribe_packet("t/+", "u/#"),
        }[kind]
    )
    packet[place % len(packet)] = byte
    try:
        head = read_head(packet)
        if head is not None:
            read_packet(head[0], bytes(packet[head[1] : head[1] + head[2]]))
            outcomes["taken"] += 1
    except ProtocolError:
        outcomes["refused"] += 1


@given(st.integers(0, 300_000))
def test_a_head_is_read_as_it_was_written(size: int) -> None:
    packet = write_packet(0x30, bytes(size))
    head = read_head(packet)
    assert head is not None
    assert head[1] + head[2] == len(packet)
    assert all(read_head(packet[:cut]) is None for cut in range(head[1]))


@given(MESSAGES)
def test_a_message_is_read_as_it_was_written(message: Publish) -> None:
    written = write_publish(message) + message.payload
    expected = message if message.is_confirmed else dataclasses.replace(message, number=0)
    assert not message.topic or read_packet(written[0], written[2:]) == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 1500), st.integers(0, 300_000)), max_size=120))
def test_what_is_kept_is_bounded_and_of_each_user_the_newest(puts: list[tuple[str, int, int]]) -> None:
    kept, rubbish = KeptMessages(), bytes(300_000)
    kept.put("honest", Publish("lease", b"held"))
    for user, topic, size in puts:
        kept.put(user, Publish(f"{user}/{topic}", rubbish[:size]))
        assert kept.total_bytes <= MOST_BYTES
        own = list(kept.matching(f"{user}/#"))
        assert len(own) <= MOST_OF_USER
        assert sum(len(one.payload) for one in own) <= MOST_BYTES_OF_USER
        assert not size or own[-1].topic == f"{user}/{topic}"
    assert [one.payload for one in kept.matching("lease")] == [b"held"], "nobody's rubbish takes another's place"


@given(st.sampled_from(ACCESSES), st.sampled_from(ACCESSES))
def test_a_wider_access_keeps_who_was_in_and_has_what_is_new(new: BrokerAccess, before: BrokerAccess) -> None:
    users = new.widened(before).users
    assert users.keys() == new.users.keys() | before.users.keys()
    assert all(users[name] == user for name, user in new.users.items())
    assert all(users[name] == before.users[name] for name in before.users.keys() - new.users.keys())


def test_an_access_is_read_as_it_was_written() -> None:
    for access in ACCESSES:
        assert parse_access(access.document()) == access
    user = {"password_sha256": digest("x"), "publish": ["a/b"], "subscribe": [], "connections": 3}
    assert parse_access({"users": {"x": user}}).users["x"].connections == 3
    wrong: tuple[object, ...] = (
        [],
        {"users": 3},
        {"users": {"x": {}}},
        {"users": {"x": {**user, "connections": 0}}},
        {"users": {"x": {**user, "most_bytes": 0}}},
        {"users": {"x": {**user, "publish": [1]}}},
        {"users": {"x": {**user, "root": True}}},
    )
    for one in wrong:
        with pytest.raises(ProtocolError):
            parse_access(one)


def test_a_will_is_no_longer_than_what_its_user_may_say() -> None:
    broker = MqttBroker(BrokerAccess({"b": dataclasses.replace(B, most_bytes=1)}))
    for number, will in enumerate((b"xx", b"x")):
        broker.take(number, Connect("b1", "b", b"b", 30, Publish("t/1", will)))
        assert broker.is_in(number) == (len(will) == 1)


def test_who_asks_hears_with_confirmation() -> None:
    broker = MqttBroker(ACCESSES[0])
    broker.take(1, Connect("a1", "a", b"a", 30, None))
    broker.take(2, Connect("b1", "b", b"b", 30, None))
    broker.take(1, Subscribe(1, (("t/#", True), ("t/1", False))))
    done = broker.take(2, Publish("t/1", b"x", True, True, 7))
    assert [one.connection for one in done] == [2, 1], "once, though two filters match"
    assert isinstance(done[1], Send)
    assert read_packet(done[1].data[0], done[1].data[2:] + done[1].payload) == Publish("t/1", b"x", True, False, 1)
