"""The format of messages on the data link: a fixed head with a JSON document, then parts of bytes. All are checked."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from edge_run.base.errors import ProtocolError
from edge_run.base.mesh import Document
from edge_run.base.strict_json import parse

VERSION = 1
MOST_FRAME_BYTES = 64 << 20
MOST_HEADER_BYTES = 64 << 10
MOST_PARTS = 64
_HEAD = struct.Struct("<2sBBQQ")
_MAGIC = b"EL"


class FrameKind(IntEnum):
    """What a frame is: a message, a signed control message, a probe of the connection, its echo, a message in bulk."""

    DATA = 1
    CONTROL = 2
    PROBE = 3
    ECHO = 4
    BULK = 5


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a message.

    connection_number: of the sender's connection; a later connection has a greater one.
    sequence: the place of the message in that connection.
    """

    kind: FrameKind
    connection_number: int
    sequence: int
    header: Document


def pack(head: Head) -> bytes:
    """Return the first frame of a message. Raises ProtocolError when the header is too large or no JSON."""
    try:
        content = json.dumps(head.header, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"message: its header is no JSON ({error})") from error
    if len(content) > MOST_HEADER_BYTES:
        raise ProtocolError(f"message: its header has {len(content)} bytes, at most {MOST_HEADER_BYTES} may be sent")
    return _HEAD.pack(_MAGIC, VERSION, head.kind, head.connection_number, head.sequence) + content


def unpack(frame: memoryview) -> Head:
    """Return what the first frame of a message says. Raises ProtocolError."""
    if not _HEAD.size < len(frame) <= _HEAD.size + MOST_HEADER_BYTES:
        raise ProtocolError(f"message: a head of {len(frame)} bytes")
    magic, version, kind, connection, sequence = _HEAD.unpack_from(frame)
    if magic != _MAGIC or version != VERSION:
        raise ProtocolError(f"message: of version {version}, this is {VERSION}; update edge-run")
    try:
        header = parse(bytes(frame[_HEAD.size :]))
        if not isinstance(header, dict):
            raise ValueError("no object")
        return Head(FrameKind(kind), connection, sequence, header)
    except ValueError as error:
        raise ProtocolError(f"message: a malformed head ({error})") from error


def check_parts(parts: Sequence[memoryview]) -> int:
    """Return how many bytes `parts` have. Raises ProtocolError where that is too many."""
    sizes = [part.nbytes for part in parts]
    if len(sizes) > MOST_PARTS or max(sizes, default=0) > MOST_FRAME_BYTES:
        raise ProtocolError(
            f"message: {len(sizes)} parts, the largest of {max(sizes)} bytes; at most {MOST_PARTS} of "
            f"{MOST_FRAME_BYTES} bytes may be sent"
        )
    return sum(sizes)
