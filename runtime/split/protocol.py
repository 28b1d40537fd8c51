"""The protocol of device and server over a TCP connection: sizes before bytes, and a deadline for every wait.

The server begins with a hello: `length (4) | JSON`, which says what it serves, or why it lets nobody in. Requests and
replies follow, little endian:

    request   kind (1), number (4), patience (4, float), length (4) | body: not looked at, a code, or an encoded image
    reply     status (1), number (4), queue seconds (4, float), computing seconds (4, float), length (4) | body

Patience is how many seconds from now the device waits for the reply. Who closes a connection wants nothing more of it.
The queue of a reply is how long the frame waited; of one to a probe, how long a frame would wait now. The body of a
reply is a list of arrays, or with the status REFUSED the reason. Nothing is unpickled or evaluated.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_run.base.errors import ProtocolError, reason_of
from edge_run.base.strict_json import parse
from edge_run.devices.link.hosts import place_text
from edge_run.partition.split_choice import CODE, IMAGE, FrameCost

VERSION = 2
DEFAULT_PORT = 7447
ASK_PROBE, ASK_CODE, ASK_IMAGE = 0, 1, 2
DONE, REFUSED = 0, 1
REQUEST, REPLY, LENGTH = struct.Struct("<BIfI"), struct.Struct("<BIffI"), struct.Struct("<I")
MOST_BODY_BYTES = {ASK_PROBE: 1 << 16, ASK_CODE: (1 << 16) + 16, ASK_IMAGE: 16 << 20}
MOST_REPLY_BYTES, MOST_HELLO_BYTES = 64 << 20, 1 << 16
MOST_SECONDS = 1e6  # that a server may say it took
MOST_PATIENCE_S = 3600.0  # that a device may have
FINGERPRINT_BYTES = 5  # in front of an image, as a code has it in its header
_HELLO, _FULL = "edge-run split", "full"
_TYPES = ("float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8", "bool")
_ARRAY = struct.Struct("<BB")
_RESET = struct.pack("ii", 1, 0)  # a socket that is closed is reset, however that happens: the server notices at once


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's answer.

    queue_s: that the frame waited in the server's queue; of a probe, that a frame would wait.
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
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
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
            patience_s = min(max(limit_s, 0.0), MOST_PATIENCE_S)
            self._socket.sendall(REQUEST.pack(kind, self._number, patience_s, len(body)) + body)
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
        spent_s = 0.0 if kind == ASK_PROBE else queue_s + server_s
        return Reply(answer, queue_s, server_s, max(waited_s - spent_s, 0.0))

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


def make_hello(tails: Mapping[str, Mapping[str, FrameCost]]) -> bytes:
    """Return the hello of a server with these networks: what it says of each kind of mode, by fingerprint."""
    listed = [
        {"fingerprint": fingerprint} | {kind: [one.seconds, one.answer_bytes] for kind, one in costs.items()}
        for fingerprint, costs in tails.items()
    ]
    return _hello({"tails": listed})


def make_full_hello(reason: str) -> bytes:
    """Return the hello of a server that lets nobody in now."""
    return _hello({_FULL: reason})


def _hello(content: dict[str, Any]) -> bytes:
    text = json.dumps({_HELLO: VERSION, **content}).encode()
    return LENGTH.pack(len(text)) + text


def _read_hello(data: bytes, address: tuple[str, int]) -> dict[str, dict[str, FrameCost]]:
    """Return what a server says of each kind of mode, by fingerprint."""
    where = place_text(*address)
    try:
        value = parse(data)
        if value[_HELLO] != VERSION:
            raise ProtocolError(f"{where}: speaks version {value[_HELLO]!a:.20}, known is {VERSION}; update one side")
        if _FULL in value:
            raise ProtocolError(f"{where}: lets nobody in now: {str(value[_FULL])[:300]}")
        return {str(one["fingerprint"]): {kind: _cost(*one[kind]) for kind in (CODE, IMAGE)} for one in value["tails"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"{where}: what answers there is no edge-run split server") from error


def _cost(seconds: object, answer_bytes: object) -> FrameCost:
    if not isinstance(seconds, int | float) or not 0 <= seconds < MOST_SECONDS:
        raise ValueError("no time that a network takes")
    if not isinstance(answer_bytes, int) or not 0 <= answer_bytes <= MOST_REPLY_BYTES:
        raise ValueError("no size that an answer has")
    return FrameCost(float(seconds), answer_bytes)
