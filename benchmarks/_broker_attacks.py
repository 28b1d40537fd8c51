"""Attacks on the embedded broker, which fill it: of strangers, and of members that went wrong."""

from __future__ import annotations

import contextlib
import sys
import time

from _attack import COUNT, Attack, Attacks
from _box import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from edge_run.devices.mesh.opening import broker_password
from mqtt_client import RawClient, connect_packet, publish_packet, subscribe_packet

MOST_SPEAKERS = 41


def speaks(attack: Attack, client: str, number: int = 0) -> RawClient:
    """A connection to the embedded broker of a member that went wrong: the one of that number."""
    members = attack.members
    device = members.devices[number]
    password = broker_password(device, members.cluster.id, members.founder.seal_key)
    one = RawClient(attack.broker_port, connect_packet(client, device.node, password))
    one.answer()
    one.socket.settimeout(0.5)
    return one


def rubbish(attack: Attack) -> None:
    """100 MB to be kept, of a stranger."""
    for number in range(20):
        with contextlib.suppress(OSError), RawClient(attack.broker_port, connect_packet("stranger")) as one:
            one.socket.sendall(publish_packet(f"x/{number}", b"A" * 5_000_000, is_kept=True))


def idle(attack: Attack) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(1000):
            with contextlib.suppress(OSError):
                one = stack.enter_context(RawClient(attack.broker_port))
                one.socket.sendall((b"", b"\x10", b"\x10\xff\x7f" + bytes(16_000))[number % 3])
        time.sleep(2)


def heads(attack: Attack) -> None:
    """Packets of 256 MiB are announced, and begun."""
    for number in range(COUNT):
        with contextlib.suppress(OSError), RawClient(attack.broker_port) as one:
            one.socket.sendall((b"\x10", b"\x31")[number % 2] + b"\xff\xff\xff\x7f" + bytes(60_000))


def names(attack: Attack) -> None:
    for _ in range(COUNT // 10):
        with contextlib.suppress(OSError):
            RawClient(attack.broker_port, connect_packet(attack.victim.node)).close()


def kept(attack: Attack) -> None:
    """For ten seconds, as much to be kept as the broker takes."""
    end_s = time.monotonic() + 10
    with speaks(attack, "rogue") as one:
        number = 0
        while time.monotonic() < end_s:
            number += 1
            with contextlib.suppress(OSError):
                one.socket.sendall(publish_packet(f"{attack.root}/plan/{number}", b"A" * 250_000, is_kept=True))


def deaf(attack: Attack) -> None:
    """40 that listen to all and take nothing, while one speaks as fast as it may for ten seconds."""
    end_s = time.monotonic() + 10
    with contextlib.ExitStack() as stack:
        for number in range(40):
            one = stack.enter_context(speaks(attack, f"deaf{number}", number))
            one.socket.sendall(subscribe_packet(f"{attack.root}/#"))
        one = stack.enter_context(speaks(attack, "speaker", MOST_SPEAKERS - 1))
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError):
                one.socket.sendall(publish_packet(f"{attack.root}/node/speaker/load", b"B" * 250_000))


def halves(attack: Attack) -> None:
    """100 connections of four members with nearly a packet each."""
    with contextlib.ExitStack() as stack:
        for number in range(100):
            with contextlib.suppress(OSError):
                one = stack.enter_context(speaks(attack, f"half{number}", number % 4))
                one.socket.sendall(publish_packet(f"{attack.root}/plan/1", b"C" * 290_000)[:-1])
        time.sleep(2)


def small(attack: Attack) -> None:
    with contextlib.suppress(OSError), speaks(attack, "small") as one:
        for number in range(1, 200):
            one.socket.sendall(subscribe_packet(*(f"{attack.root}/plan/{number}{i}" for i in range(60)), number=number))
        one.socket.sendall(
            b"".join(publish_packet(f"{attack.root}/plan/{n}", b"x", is_kept=True) for n in range(50_000))
        )


BROKER_ATTACKS: Attacks = {
    "a stranger: 100 MB to be kept": rubbish,
    "a stranger: 1,000 connections that say little": idle,
    "a stranger: 1,000 packets of 256 MiB": heads,
    "a stranger: the victim's name, 100 times": names,
    "a member: all that it may have kept, 10 s": kept,
    "40 members that take nothing, 10 s": deaf,
    "four members: 100 packets that do not end": halves,
    "a member: 12,000 filters, 50,000 kept messages": small,
}
