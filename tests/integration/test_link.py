"""The data link over real sockets: order, keys, losses, and what cannot be."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import zmq

import waiting
from edge_run.base.errors import Cancelled, DeviceLost, MeshError, NotTrusted, ProtocolError
from edge_run.base.mesh import Message
from edge_run.devices.link import connection, service
from edge_run.devices.link import inbox as link_inbox
from edge_run.devices.link.connection import Candidate, Keys, Peer
from edge_run.devices.link.data_link import DataLink
from edge_run.devices.link.frames import MOST_HEADER_BYTES, MOST_PARTS, FrameKind, Head, pack
from patience import LONG_SILENCE_S
from slow_relay import relay

WAIT_S = 30.0
until = partial(waiting.until, limit_s=WAIT_S)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", LONG_SILENCE_S)


def peer(node: str, link: DataLink, *others: str, incarnation: str = "1") -> Peer:
    return Peer(node, incarnation, link.key, (*others, f"tcp://127.0.0.1:{link.port}"))


@contextlib.contextmanager
def pair() -> Iterator[tuple[DataLink, DataLink]]:
    with contextlib.closing(DataLink()) as a, contextlib.closing(DataLink()) as b:
        a.set_peers({"b": peer("b", b)})
        b.set_peers({"a": peer("a", a)})
        yield a, b


def get(link: DataLink) -> Message:
    message = link.receive(timeout_s=WAIT_S)
    assert message is not None
    return message


def test_messages_arrive_whole_in_order_and_from_whom_they_are() -> None:
    chance = random.Random(1)
    sent = [[os.urandom(chance.choice([0, 1, 16384, 3_000_000])) for _ in range(number % 4)] for number in range(40)]
    with pair() as (a, b):

        def send_all() -> None:
            for number, parts in enumerate(sent):
                a.send("b", {"n": number}, list(map(memoryview, parts)), timeout_s=WAIT_S)

        sender = threading.Thread(target=send_all)
        sender.start()
        for number, parts in enumerate(sent):
            message = get(b)
            assert (message.node, message.header) == ("a", {"n": number})
            assert [bytes(part) for part in message.parts] == parts
        sender.join(WAIT_S)


def test_on_a_slow_link_a_long_part_does_not_keep_a_peer_from_saying_that_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt's activation takes 10 s here: longer than either device may be silent."""
    monkeypatch.setattr(connection, "SILENCE_S", 4.0)  # of the other one, it is 6 s
    part = os.urandom(4_000_000)
    with contextlib.closing(DataLink()) as a, contextlib.closing(DataLink()) as b, relay(b.port, 400_000) as slow:
        a.set_peers({"b": Peer("b", "1", b.key, (f"tcp://127.0.0.1:{slow}",))})
        b.set_peers({"a": peer("a", a)})
        started = time.monotonic()
        a.send("b", {"n": 0}, [memoryview(part)], timeout_s=WAIT_S)
        message = b.receive(timeout_s=60)
        assert message is not None
        assert bytes(message.parts[0]) == part
        assert time.monotonic() - started > 8
        a.send("b", {"n": 1}, timeout_s=WAIT_S)
        assert get(b).header == {"n": 1}, "by the same connection, in its order"
        assert a.receive(timeout_s=0.0) is None, "no loss was told"


def test_parts_may_be_used_again_at_once() -> None:
    with pair() as (a, b):
        buffer = bytearray(100_000)
        for number in range(8):
            buffer[:] = bytes([number]) * len(buffer)
            a.send("b", {}, [memoryview(buffer)], timeout_s=WAIT_S)
        assert [set(bytes(get(b).parts[0])) for _ in range(8)] == [{number} for number in range(8)]


def test_of_several_addresses_one_that_works_is_taken() -> None:
    with contextlib.closing(DataLink(("127.0.0.1", "127.0.0.2"))) as a, contextlib.closing(DataLink()) as b:
        with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections, and says nothing
            places = (f"tcp://127.0.0.1:{mute.getsockname()[1]}", "tcp://127.0.0.1:1")
            a.set_peers({"b": peer("b", b, *places)})
            b.set_peers({"a": peer("a", a)})
            a.send("b", {}, timeout_s=WAIT_S)
            get(b)
            assert a.rates()["b"].place == f"tcp://127.0.0.1:{b.port}"
        until(lambda: a.measure("b", timeout_s=WAIT_S).bytes_per_s > 1e6)  # one measurement may be disturbed
        assert 0 < a.rates()["b"].round_trip_s < 1


def test_of_two_connections_that_work_the_faster_is_taken() -> None:
    with (
        contextlib.closing(DataLink()) as a,
        contextlib.closing(DataLink()) as b,
        relay(b.port, delay_s=0.1) as slow,
    ):
        a.set_peers({"b": peer("b", b, f"tcp://127.0.0.1:{slow}")})
        b.set_peers({"a": peer("a", a)})
        a.send("b", {}, timeout_s=WAIT_S)
        get(b)
        assert a.rates()["b"].place == f"tcp://127.0.0.1:{b.port}"
        a.set_peers({"b": Peer("b", "2", b.key, (f"tcp://127.0.0.1:{slow}",))})
        a.send("b", {"slow": 1}, timeout_s=WAIT_S)
        assert a.rates()["b"].round_trip_s > 0.1


def test_who_is_no_member_is_refused_and_a_later_announcement_lets_him_in() -> None:
    with contextlib.closing(DataLink()) as a, contextlib.closing(DataLink()) as b:
        with pytest.raises(NotTrusted):
            a.send("b", {}, timeout_s=1)
        a.set_peers({"b": peer("b", b)})
        with pytest.raises(DeviceLost, match="key"):
            a.send("b", {}, timeout_s=WAIT_S)
        assert b.refused > 0
        assert b.receive(timeout_s=0.1) is None
        b.set_peers({"a": peer("a", a)})
        a.send("b", {}, timeout_s=WAIT_S)
        assert get(b).node == "a"


def test_somebody_elses_key_at_the_right_address_is_refused() -> None:
    with pair() as (a, b), contextlib.closing(DataLink()) as thief:
        a.set_peers({"b": Peer("b", "1", b.key, (f"tcp://127.0.0.1:{thief.port}",))})
        thief.set_peers({"a": peer("a", a)})
        with pytest.raises(DeviceLost):
            a.send("b", {}, timeout_s=2)
        assert thief.receive(timeout_s=0.1) is None


def test_a_loss_is_told_once_to_both_who_send_and_who_only_receive() -> None:
    with pair() as (a, b):
        a.send("b", {}, timeout_s=WAIT_S)
        get(b)
        until(lambda: "a" in b.rates())  # b watches who speaks to it
        a.close()
        with pytest.raises(DeviceLost) as caught:
            b.receive(timeout_s=WAIT_S)
        assert caught.value.node == "a"
        assert b.receive(timeout_s=0.3) is None
        with pytest.raises(DeviceLost):
            b.send("a", {}, timeout_s=1)


def test_a_peer_that_started_anew_is_lost_and_works_again() -> None:
    with pair() as (a, b):
        a.send("b", {}, timeout_s=WAIT_S)
        get(b)
        with contextlib.closing(DataLink()) as again:
            again.set_peers({"a": peer("a", a)})
            a.set_peers({"b": peer("b", again, incarnation="2")})
            with pytest.raises(DeviceLost):
                a.receive(timeout_s=WAIT_S)
            a.send("b", {"incarnation": 2}, timeout_s=WAIT_S)
            assert get(again).header == {"incarnation": 2}


def test_a_receiver_that_does_not_fetch_stops_the_sender_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_inbox, "MOST_BYTES", 4 << 20)
    block = memoryview(bytes(4 << 20))

    def flood(timeout_s: float = 0.5) -> int:
        for number in range(100):
            a.send("b", {"n": number}, [block], timeout_s=timeout_s)
        return 100

    with pair() as (a, b):
        assert flood(timeout_s=30) == 100, "nobody ever received, so nobody is waited for"
        while b.receive(timeout_s=0.0) is not None:
            pass
        started = time.monotonic()
        with pytest.raises(DeviceLost):
            flood()
        assert time.monotonic() - started < 60


def test_what_nobody_wants_does_not_fill_the_queue_of_who_waits() -> None:
    """An idle coordinator receives nothing for hours: its link stays there for probes, control messages and pieces."""
    with pair() as (a, b):
        assert b.receive(timeout_s=0.0) is None
        b.take_only(lambda item: isinstance(item, Message) and item.header.get("epoch") == 7)
        for number in range(link_inbox.MOST_MESSAGES + 200):
            a.send("b", {"epoch": 6, "number": number}, timeout_s=WAIT_S)
        a.send("b", {"epoch": 7}, timeout_s=WAIT_S)
        assert a.measure("b", timeout_s=WAIT_S).bytes_per_s > 0
        assert get(b).header == {"epoch": 7}


def test_measuring_is_stopped_at_once() -> None:
    def stop() -> None:
        raise Cancelled("enough")

    with pair() as (a, b), socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections, and says nothing
        a.set_peers({"b": Peer("b", "1", b.key, (f"tcp://127.0.0.1:{mute.getsockname()[1]}",))})
        started = time.monotonic()
        with pytest.raises(Cancelled):
            a.measure("b", timeout_s=2 * WAIT_S, check=stop)
        assert time.monotonic() - started < WAIT_S


def test_what_was_measured_of_one_that_has_gone_is_forgotten() -> None:
    """Each run beside a program that stays is another node: what is said of links would grow without end."""
    with pair() as (a, b):
        first = a.measure("b", timeout_s=WAIT_S)
        assert a.measure("b", timeout_s=WAIT_S, fresh_s=60.0) is first
        a.set_peers({})
        assert not a.rates()
        assert not a._service.measured_s
        a.set_peers({"b": peer("b", b)})
        assert a.measure("b", timeout_s=WAIT_S, fresh_s=60.0) is not first


def test_what_cannot_be_sent_is_said_before() -> None:
    with pair() as (a, b):
        with pytest.raises(ProtocolError, match="parts"):
            a.send("b", {}, [memoryview(b"")] * (MOST_PARTS + 1), timeout_s=1)
        with pytest.raises(ProtocolError, match="header"):
            a.send("b", {"x": "x" * MOST_HEADER_BYTES}, timeout_s=1)
        with pytest.raises(ProtocolError, match="JSON"):
            a.send("b", {"x": float("nan")}, timeout_s=1)
        a.send("b", {}, timeout_s=WAIT_S)
        get(b)
    with pytest.raises(MeshError, match="closed") as caught:
        a.send("b", {}, timeout_s=1)
    assert not isinstance(caught.value, DeviceLost), "nobody else is to blame"
    with pytest.raises(MeshError, match="closed"):
        a.receive(timeout_s=1)


def test_noise_at_the_listener_harms_nobody() -> None:
    """500 connections of strangers: noise, half a greeting, a greeting without a key; then all goes on."""
    chance = random.Random(5)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
    with pair() as (a, b):
        for number in range(500):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", b.port), 2) as stranger:
                noise = (
                    os.urandom(chance.randrange(1, 300)),
                    greeting[: chance.randrange(1, 64)],
                    greeting + os.urandom(200),
                )
                stranger.sendall(noise[number % 3])
        a.send("b", {"still": "here"}, timeout_s=WAIT_S)
        assert get(b).header == {"still": "here"}
        assert b.receive(timeout_s=0.1) is None


def test_a_member_that_sends_nonsense_is_refused_message_by_message(caplog: pytest.LogCaptureFixture) -> None:
    """500 messages of a member that went wrong: truncated, foreign, with gaps, too many parts: none is handed on."""
    chance = random.Random(9)
    good = pack(Head(FrameKind.DATA, 5, 0, {"n": 0}, (4,)))
    context = zmq.Context()
    keys = Keys(*zmq.curve_keypair())
    caplog.set_level(logging.WARNING)
    started = time.monotonic()
    with contextlib.closing(DataLink()) as b:
        rogue = Peer("rogue", "1", keys.public.decode(), ("tcp://127.0.0.1:1",))
        b.set_peers({"rogue": rogue})
        candidate = Candidate(context, f"tcp://127.0.0.1:{b.port}", peer("b", b), keys)
        try:
            deadline = time.monotonic() + WAIT_S
            while candidate.watch() != "ready":
                assert time.monotonic() < deadline
            for number in range(500):
                frame = bytearray(good)
                parts = [b"part"]
                if number % 6 == 0:
                    del frame[chance.randrange(len(frame)) :]
                elif number % 6 == 1:
                    frame[chance.randrange(4)] ^= 1 + chance.randrange(255)
                elif number % 6 == 2:
                    frame = bytearray(pack(Head(FrameKind.DATA, 5, 7 + number, {}, (4,))))
                elif number % 6 == 3:
                    parts *= MOST_PARTS + 1
                elif number % 6 == 4:
                    parts = [b"par"]
                else:
                    frame = bytearray(good[:-7] + b"{" * 30_000)
                candidate.socket.send_multipart([bytes(frame), *parts])
            until(lambda: b.refused >= 400, limit_s=60)
            assert b.receive(timeout_s=0.2) is None
            candidate.socket.send_multipart([pack(Head(FrameKind.DATA, 6, 0, {"n": 1}))])
            assert get(b).header == {"n": 1}
            told = [one for one in caplog.records if one.getMessage().startswith("data link: refused")]
            most = 2 + int((time.monotonic() - started) / service.TELL_S)
            assert 1 <= len(told) <= most, "the log does not grow with what is refused"
        finally:
            candidate.close()
            context.destroy(0)


@pytest.mark.parametrize("is_back", [True, False])
def test_who_was_given_up_and_speaks_on_is_heard(is_back: bool) -> None:
    """After a freeze, say: b has given a up, and a, whose connection lives, knows nothing of that."""
    with contextlib.closing(DataLink()) as a:
        strangers: list[str] = []

        def meet(node: str) -> None:
            strangers.append(node)
            if is_back:
                b.set_peers({"a": peer("a", a)})

        with contextlib.closing(DataLink(on_stranger=meet)) as b:
            a.set_peers({"b": peer("b", b)})
            b.set_peers({"a": peer("a", a)})
            a.send("b", {"n": 0}, timeout_s=WAIT_S)
            assert get(b).header == {"n": 0}
            b.set_peers({})
            b.drop("a", "it was silent")
            with pytest.raises(DeviceLost):
                get(b)
            a.send("b", {"n": 1}, timeout_s=WAIT_S)
            until(lambda: strangers == ["a"])
            b.set_peers({"a": peer("a", a)})
            a.send("b", {"n": 2}, timeout_s=WAIT_S)
            assert [get(b).header for _ in range(1 + is_back)] == [{"n": 1}, {"n": 2}][not is_back :]
            assert b.refused == (not is_back)


@pytest.mark.parametrize("when", ["linked", "not reached", "before"])
def test_whoever_is_watched_is_missed_though_it_never_spoke(when: str) -> None:
    with contextlib.closing(DataLink()) as a, contextlib.closing(DataLink()) as b:
        a.set_peers({"b": peer("b", b)})
        if when != "before":
            b.set_peers({"a": Peer("a", "1", a.key, ("tcp://127.0.0.1:1",)) if when == "not reached" else peer("a", a)})
        b.watch("a")
        if when == "linked":
            until(lambda: "a" in b.rates())
            a.close()
        elif when == "not reached":  # whether it lives is for others to know
            assert b.receive(timeout_s=0.5) is None
            b.drop("a", "it is silent")
        with pytest.raises(DeviceLost) as caught:
            b.receive(timeout_s=WAIT_S)
        assert caught.value.node == "a"
        assert b.receive(timeout_s=0.3) is None, "once"


def test_whoever_is_watched_is_missed_also_after_a_while_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "IDLE_S", 0.2)
    with pair() as (a, b):
        b.watch("a")
        until(lambda: "a" in b.rates())
        b.unwatch("a")
        until(lambda: "a" not in b.rates())
        b.watch("a")
        until(lambda: "a" in b.rates())
        time.sleep(0.5)
        a.close()
        b.drop("a", "it is silent")
        with pytest.raises(DeviceLost) as caught:
            b.receive(timeout_s=WAIT_S)
        assert caught.value.node == "a"


def test_where_it_cannot_listen_nothing_stays_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        gc.collect()
        before = {*os.listdir("/proc/self/fd")}
        with pytest.raises(MeshError, match="cannot listen"):
            DataLink(port=port)
        gc.collect()  # a socket left to the collector is a warning, and an error here
        assert {*os.listdir("/proc/self/fd")} <= before
