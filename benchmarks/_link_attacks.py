"""Attacks on a device's data link and its control messages: of strangers, and of a member that went wrong."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time

import paho.mqtt.client as paho
import zmq
from _attack import COUNT, Attack, Attacks

from edge_run.base.units import MIB
from edge_run.devices.link.connection import Keys
from edge_run.devices.link.frames import MOST_FRAME_BYTES, MOST_PARTS, FrameKind, Head, message_of


def noise(attack: Attack) -> None:
    chance = random.Random(5)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
    for number in range(COUNT):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", attack.port), 2) as stranger:
            parts = (os.urandom(300), greeting[: chance.randrange(1, 64)], greeting + os.urandom(200))
            stranger.sendall(parts[number % 3])


def unknown_keys(attack: Attack) -> None:
    for _ in range(COUNT // 10):
        with attack.connected(Keys(*zmq.curve_keypair())) as sock, contextlib.suppress(zmq.Again):
            sock.send_multipart([attack.head(sizes=(1 << 17,)), bytes(1 << 17)], zmq.NOBLOCK)


def malformed(attack: Attack) -> None:
    chance = random.Random(9)
    with attack.connected() as sock:
        for number in range(COUNT):
            frame, parts = bytearray(attack.head(sizes=(4,))), [b"part"]
            if number % 5 == 0:
                del frame[chance.randrange(len(frame)) :]
            elif number % 5 == 1:
                frame[chance.randrange(4)] ^= 1 + chance.randrange(255)
            elif number % 5 == 2:
                frame = bytearray(attack.head(sequence=7, sizes=(4,)))
            elif number % 5 == 3:
                parts *= MOST_PARTS + 1
            else:
                frame = bytearray(bytes(frame[:25]) + b"{" * 30_000)
            sock.send_multipart([bytes(frame), *parts])


def oversized(attack: Attack) -> None:
    block = bytes(MOST_FRAME_BYTES + 1)
    for _ in range(5):
        with attack.connected() as sock:
            sock.send_multipart([attack.head(sizes=(len(block),)), block], copy=False)
            time.sleep(0.2)


def flood(attack: Attack) -> None:
    """Messages that could be, as fast as they go: 2 GiB."""
    block = bytes(32 * MIB)
    with attack.connected() as sock:
        connection = attack.connection = attack.connection + 1
        for number in range(64):
            sock.send_multipart(message_of(Head(FrameKind.DATA, connection, number, {"n": number}), [block]))
        time.sleep(1)


def many_parts(attack: Attack) -> None:
    """A message of 2 GiB in frames of 128 KiB, of which its head names none."""
    block = bytes(MOST_FRAME_BYTES)
    with attack.connected() as sock:
        sock.send_multipart([attack.head(), *[block] * (16 << 10)], copy=False)
        time.sleep(3)


def control(attack: Attack) -> None:
    """What goes over the broker, heard and said again, cut short, with a wrong bit, by 1,000; and 250 KB of noise."""
    chance, heard = random.Random(3), []
    client = paho.Client(paho.CallbackAPIVersion.VERSION2)
    client.on_message = lambda _, __, message: heard.append((message.topic, message.payload))
    client.connect("127.0.0.1", attack.broker_port)
    client.subscribe("edge/v1/#")
    client.loop_start()
    attack.rogue.report({"busy": 1})
    time.sleep(12)  # a heartbeat, and what was kept
    client.unsubscribe("edge/v1/#")
    for number in range(COUNT):
        topic, payload = chance.choice(heard)
        spoiled = bytearray(payload or b"x")
        if number % 4 == 1:
            del spoiled[chance.randrange(len(spoiled)) :]
        elif number % 4 == 2:
            spoiled[chance.randrange(len(spoiled))] ^= 1 << chance.randrange(8)
        elif number % 4 == 3:
            topic = f"{topic.rpartition('/')[0]}/cmd"
            spoiled = bytearray(chance.randbytes(250_000)) if number % 8 == 3 else spoiled
        client.publish(topic, bytes(spoiled), qos=1).wait_for_publish(5)
    client.loop_stop()
    client.disconnect()


def bad_key(attack: Attack) -> None:
    """A key of 40 spaces, and places of the victim's own machine, announced for three seconds."""
    with attack.rogue.held() as state:
        good = state.link
    for link in ({"key": " " * 40, "places": ["tcp://127.0.0.1:9999"]}, {**good, "places": ["tcp://127.0.0.1:22"]}):
        for _ in range(15):
            with attack.rogue.held() as state:
                state.link = link
                state.announce()
            time.sleep(0.1)
    with attack.rogue.held() as state:
        state.link = good
        state.announce()


def too_many(attack: Attack) -> None:
    """748 connections that say nothing, to a device that may have 256 files open."""
    with contextlib.ExitStack() as stack:
        for _ in range(748):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(("127.0.0.1", attack.port), 0.2))
        time.sleep(3)


LINK_ATTACKS: Attacks = {
    "noise of strangers, 1,000 connections": noise,
    "keys that nobody knows, 100 connections": unknown_keys,
    "748 connections that say nothing": too_many,
    "the broker: 1,000 control messages": control,
    "a member: a key and places that are none": bad_key,
    "a member: 1,000 messages that cannot be": malformed,
    "a member: 5 frames that are too large": oversized,
    "a member: 2 GiB in messages of 32 MiB": flood,
    "a member: a message of 2 GiB in 256 parts": many_parts,
}
