"""A client of MQTT 3.1.1 that says what it likes: for attacks on brokers."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

from edge_run.devices.broker.packets import write_packet

WAIT_S = 30.0  # for a busy machine; more than the broker waits for who says nothing


def text(word: str | bytes) -> bytes:
    content = word.encode() if isinstance(word, str) else word
    return struct.pack(">H", len(content)) + content


def connect_packet(client: str, user: str = "", password: str = "", *, will: str = "", keepalive_s: int = 30) -> bytes:
    flags = 2 | (0xC0 if user else 0) | (4 if will else 0)
    content = text("MQTT") + bytes([4, flags]) + struct.pack(">H", keepalive_s) + text(client)
    if will:
        content += text(will) + text("will")
    return write_packet(0x10, content + (text(user) + text(password) if user else b""))


def publish_packet(topic: str, payload: bytes, *, is_kept: bool = False, number: int = 0) -> bytes:
    mark = number.to_bytes(2, "big") if number else b""
    return write_packet(0x30 | (2 if number else 0) | is_kept, text(topic) + mark + payload)


def subscribe_packet(*filters: str, number: int = 1) -> bytes:
    return write_packet(0x82, number.to_bytes(2, "big") + b"".join(text(one) + b"\1" for one in filters))


class RawClient:
    """A connection; what comes is looked at only when asked."""

    def __init__(self, port: int, packet: bytes = b"") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), WAIT_S)
        if packet:
            self.socket.sendall(packet)

    def answer(self) -> int:
        """What the broker said to who connects; -1 where it ended the connection instead."""
        try:
            said = self.socket.recv(4)
        except OSError:
            return -1
        return said[3] if len(said) == 4 and said[0] == 0x20 else -1

    def hears(self, word: bytes, within_s: float) -> bool:
        """Whether something with `word` in it comes."""
        heard, end_s = b"", time.monotonic() + within_s
        while word not in heard and (left_s := end_s - time.monotonic()) > 0:
            self.socket.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                part = self.socket.recv(1 << 20)
                if not part:
                    break
                heard += part
        return word in heard

    def ended_within(self, limit_s: float) -> bool:
        """Whether the broker ends the connection in `limit_s`."""
        end_s = time.monotonic() + limit_s
        while (left_s := end_s - time.monotonic()) > 0:
            self.socket.settimeout(left_s)
            try:
                if not self.socket.recv(1 << 20):
                    return True
            except TimeoutError:
                return False
            except OSError:
                return True
        return False

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
