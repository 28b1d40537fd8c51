"""The format of messages on the data link: a fixed head with a JSON document, then parts of bytes. All are checked.

Parts are cut into frames, as a device says that it lives between two frames only: one frame of a long prompt's
activation takes a slow link longer than a peer may be silent.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from edge_run.base.errors import ProtocolError
from edge_run.base.fields import Document
from edge_run.base.mesh import MOST_PART_BYTES
from edge_run.base.strict_json import parse

VERSION = 2
MOST_FRAME_BYTES = 128 << 10  # half a second on a link of 2 Mbit/s
MOST_HEADER_BYTES = 64 << 10
MOST_PARTS = 64
_HEAD = struct.Struct("<2sBBQQB")
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
    sizes: of the parts, in bytes.
    """

    kind: FrameKind
    connection_number: int
    sequence: int
    header: Document
    sizes: tuple[int, ...] = ()


def message_of(head: Head, parts: Sequence[memoryview | bytes] = ()) -> list[bytes | memoryview]:
    """Return the frames of a message of `parts`, which `head` need not know. Raises ProtocolError as `pack`."""
    views = [memoryview(part) for part in parts]
    check_sizes(sizes := tuple(view.nbytes for view in views))
    views = [view.cast("B") for view in views if view.nbytes]
    cut = [view[at : at + MOST_FRAME_BYTES] for view in views for at in range(0, view.nbytes, MOST_FRAME_BYTES)]
    return [pack(replace(head, sizes=sizes)), *cut]


def parts_of(head: Head, frames: Sequence[memoryview]) -> tuple[memoryview, ...]:
    """Return the parts of a message of which `frames` follow its head. Raises ProtocolError where they cannot be."""
    expected = [min(MOST_FRAME_BYTES, size - at) for size in head.sizes for at in range(0, size, MOST_FRAME_BYTES)]
    if [frame.nbytes for frame in frames] != expected:
        raise ProtocolError(f"message: {len(frames)} frames, which are not those of parts of {sum(head.sizes)} bytes")
    left, parts = iter(frames), []
    for size in head.sizes:
        cut = [next(left) for _ in range(0, size, MOST_FRAME_BYTES)]
        parts.append(cut[0] if len(cut) == 1 else memoryview(b"".join(cut)))
    return tuple(parts)


def pack(head: Head) -> bytes:
    """Return the first frame of a message. Raises ProtocolError when the header is too large or no JSON."""
    try:
        content = json.dumps(head.header, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"message: its header is no JSON ({error})") from error
    if len(content) > MOST_HEADER_BYTES:
        raise ProtocolError(f"message: its header has {len(content)} bytes, at most {MOST_HEADER_BYTES} may be sent")
    fixed = _HEAD.pack(_MAGIC, VERSION, head.kind, head.connection_number, head.sequence, len(head.sizes))
    return fixed + struct.pack(f"<{len(head.sizes)}I", *head.sizes) + content


def unpack(frame: memoryview) -> Head:
    """Return what the first frame of a message says. Raises ProtocolError."""
    if not _HEAD.size < len(frame) <= _HEAD.size + 4 * MOST_PARTS + MOST_HEADER_BYTES:
        raise ProtocolError(f"message: a head of {len(frame)} bytes")
    magic, version, kind, connection, sequence, n_parts = _HEAD.unpack_from(frame)
    if magic != _MAGIC or version != VERSION:
        raise ProtocolError(f"message: of version {version}, this is {VERSION}; update edge-run")
    begin = _HEAD.size + 4 * n_parts
    if begin > len(frame):
        raise ProtocolError(f"message: a head of {len(frame)} bytes, of {n_parts} parts")
    check_sizes(sizes := struct.unpack_from(f"<{n_parts}I", frame, _HEAD.size))
    try:
        header = parse(bytes(frame[begin:]))
        if not isinstance(header, dict):
            raise ValueError("no object")
        return Head(FrameKind(kind), connection, sequence, header, sizes)
    except ValueError as error:
        raise ProtocolError(f"message: a malformed head ({error})") from error


def check_sizes(sizes: Sequence[int]) -> None:
    """Raise ProtocolError where parts of `sizes` bytes are too many, or too large."""
    if len(sizes) > MOST_PARTS or max(sizes, default=0) > MOST_PART_BYTES:
        raise ProtocolError(
            f"message: {len(sizes)} parts, the largest of {max(sizes)} bytes; at most {MOST_PARTS} of "
            f"{MOST_PART_BYTES} bytes may be sent"
        )
