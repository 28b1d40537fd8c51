"""The protocol of device and server over a TCP connection: sizes before bytes, and a deadline for every wait.

The server begins with a hello: `length (4) | JSON`. Requests and replies follow, little endian:

    request   kind (1), number (4), length (4) | body: nothing that is looked at, a code, or an encoded image
    reply     status (1), number (4), queue seconds (4, float), computing seconds (4, float), length (4) | body

The body of a reply is a list of arrays, or with the status REFUSED the reason. Nothing is unpickled or evaluated.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_run.base.errors import ProtocolError, reason_of
from edge_run.base.strict_json import parse
from edge_run.devices.link.hosts import place_text

VERSION = 1
DEFAULT_PORT = 7447
PROBE, CODE, IMAGE = 0, 1, 2
DONE, REFUSED = 0, 1
REQUEST, REPLY, LENGTH = struct.Struct("<BII"), struct.Struct("<BIffI"), struct.Struct("<I")
MOST_BODY_BYTES = {PROBE: 1 << 16, CODE: (1 << 16) + 16, IMAGE: 16 << 20}
MOST_REPLY_BYTES, MOST_HELLO_BYTES = 64 << 20, 1 << 16
MOST_SECONDS = 1e6  # that a server may say it took
FINGERPRINT_BYTES = 5  # in front of an image, as a code has it in its header
_TYPES = ("float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8", "bool")
_ARRAY = struct.Struct("<BB")


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's answer.

    queue_s: in the server's queue.
    server_s: of the server's computing.
    network_s: what the exchange took besides.
    """

    body: bytes
    queue_s: float
    server_s: float
    network_s: float


class LinkLost(OSError):
    """The server does not answer: refused, reset, closed or silent for too long."""


class FrameRefused(ProtocolError):
    """The server answers, and will not compute this frame: the message is its reason."""


def pack_arrays(arrays: Sequence[NDArray[Any]]) -> bytes:
    """Return arrays as bytes. Raises ProtocolError for one of a type that is not known."""
    pieces = [bytes([len(arrays)])]
    for array in arrays:
        if str(array.dtype) not in _TYPES or array.ndim > 16:
            raise ProtocolError(f"answer: of type {array.dtype}, which cannot be sent")
        pieces.append(_ARRAY.pack(_TYPES.index(str(array.dtype)), array.ndim))
        pieces.append(struct.pack(f"<{array.ndim}I", *array.shape))
        pieces.append(np.ascontiguousarray(array).tobytes())
    return b"".join(pieces)


def unpack_arrays(data: bytes) -> list[NDArray[Any]]:
    """Return the arrays in `data`. Raises ProtocolError where it does not hold exactly what it says."""
    arrays: list[NDArray[Any]] = []
    try:
        count, place = data[0], 1
        for _ in range(count):
            kind, rank = _ARRAY.unpack_from(data, place)
            shape = struct.unpack_from(f"<{rank}I", data, place + _ARRAY.size)
            place += _ARRAY.size + 4 * rank
            dtype = np.dtype(_TYPES[kind])
            size = dtype.itemsize
            for one in shape:
                size *= one  # a Python integer: it cannot overflow
            if size > len(data) - place:
                raise ProtocolError(f"answer: an array of {size} bytes in {len(data) - place}; it is truncated")
            arrays.append(np.frombuffer(data, dtype, size // dtype.itemsize, place).reshape(shape).copy())
            place += size
    except (IndexError, struct.error, ValueError) as error:
        raise ProtocolError(f"answer: {len(data)} bytes that cannot be read ({error})") from error
    if place != len(data):
        raise ProtocolError(f"answer: {len(data) - place} bytes too many")
    return arrays


class ServerLink:
    """A connection to a server, for one request at a time. Every failure of the network is LinkLost; then close it."""

    def __init__(self, address: tuple[str, int], limit_s: float) -> None:
        """Connect, and read the server's hello. Raises LinkLost, or ProtocolError where something else answers."""
        self._number = 0
        end_s = time.monotonic() + limit_s
        try:
            self._socket = socket.create_connection(address, timeout=limit_s)
        except (OSError, ValueError) as error:  # a value: a name that no host can have
            reason = reason_of(error)
            raise LinkLost(f"{place_text(*address)}: {reason}") from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            (length,) = LENGTH.unpack(self._receive(LENGTH.size, end_s))
            if length > MOST_HELLO_BYTES:
                raise ProtocolError(f"{place_text(*address)}: what answers there is no edge-run split server")
            self.hello = _read_hello(self._receive(length, end_s), address)
        except BaseException:
            self.close()
            raise

    def ask(self, kind: int, body: bytes, limit_s: float) -> Reply:
        """Send a request; return the reply. Raises LinkLost, or FrameRefused where the server refuses `body`."""
        self._number = (self._number + 1) % (1 << 32)
        started_s = time.monotonic()
        end_s = started_s + limit_s
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(REQUEST.pack(kind, self._number, len(body)) + body)
        except OSError as error:
            raise LinkLost(str(error)) from error
        status, number, queue_s, server_s, length = REPLY.unpack(self._receive(REPLY.size, end_s))
        is_sane = all(0 <= seconds < MOST_SECONDS for seconds in (queue_s, server_s)) and length <= MOST_REPLY_BYTES
        if number != self._number or not is_sane:
            raise LinkLost("the server's reply is not to what was asked")
        answer = self._receive(length, end_s)
        if status != DONE:
            raise FrameRefused(f"server: refuses: {answer[:300].decode('utf-8', 'replace')}")
        waited_s = time.monotonic() - started_s
        return Reply(answer, queue_s, server_s, max(waited_s - queue_s - server_s, 0.0))

    def close(self) -> None:
        """End the connection; again is no harm."""
        self._socket.close()

    def _receive(self, count: int, end_s: float) -> bytes:
        pieces = bytearray()
        while len(pieces) < count:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise LinkLost("the server did not answer in time")
            try:
                self._socket.settimeout(left_s)
                piece = self._socket.recv(min(count - len(pieces), 1 << 20))
            except OSError as error:
                raise LinkLost(str(error)) from error
            if not piece:
                raise LinkLost("the server closed the connection")
            pieces += piece
        return bytes(pieces)


def make_hello(tails: Sequence[dict[str, Any]]) -> bytes:
    """Return the hello of a server with these networks (fingerprint, code_s, image_s)."""
    text = json.dumps({"edge-run split": VERSION, "tails": list(tails)}).encode()
    return LENGTH.pack(len(text)) + text


def _read_hello(data: bytes, address: tuple[str, int]) -> dict[str, dict[str, float]]:
    """Return the seconds that a server needs, by fingerprint and kind of mode."""
    where = place_text(*address)
    try:
        value = parse(data)
        if value["edge-run split"] != VERSION:
            raise ProtocolError(
                f"{where}: speaks version {value['edge-run split']!a:.20}, known is {VERSION}; update one side"
            )
        return {
            str(one["fingerprint"]): {"code": _seconds(one["code_s"]), "image": _seconds(one["image_s"])}
            for one in value["tails"]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"{where}: what answers there is no edge-run split server") from error


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value < MOST_SECONDS:
        raise ValueError("no time that a network takes")
    return float(value)
