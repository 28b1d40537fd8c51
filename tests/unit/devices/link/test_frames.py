"""The frames of a message: what is cut is joined again, and what cannot be is refused before it is looked at."""

from __future__ import annotations

import random

import numpy as np
import pytest

from edge_run.base.errors import ProtocolError
from edge_run.base.mesh import MOST_PART_BYTES
from edge_run.devices.link.frames import (
    MOST_FRAME_BYTES,
    MOST_PARTS,
    FrameKind,
    Head,
    check_sizes,
    message_of,
    pack,
    parts_of,
    unpack,
)

HEAD = Head(FrameKind.DATA, 7, 3, {"n": 1})
SIZES = [0, 1, 5, MOST_FRAME_BYTES - 1, MOST_FRAME_BYTES, MOST_FRAME_BYTES + 1, 3 * MOST_FRAME_BYTES, 400_001]


def test_what_is_cut_is_joined_again() -> None:
    chance = random.Random(4)
    for number in range(60):
        parts = [chance.randbytes(chance.choice(SIZES)) for _ in range(number % 5)]
        first, *rest = (memoryview(frame) for frame in message_of(HEAD, parts))
        assert max((frame.nbytes for frame in rest), default=0) <= MOST_FRAME_BYTES
        head = unpack(first)
        assert (head.kind, head.connection_number, head.sequence, head.header) == (FrameKind.DATA, 7, 3, {"n": 1})
        assert list(map(bytes, parts_of(head, rest))) == parts


def test_a_matrix_goes_as_its_bytes() -> None:
    rows = np.arange(60_000, dtype=np.float32).reshape(3, -1)
    first, *rest = (memoryview(frame) for frame in message_of(HEAD, [memoryview(rows), memoryview(rows[:0])]))
    assert list(map(bytes, parts_of(unpack(first), rest))) == [rows.tobytes(), b""]


@pytest.mark.parametrize("sizes", [(), (4,), (5, 1), (MOST_FRAME_BYTES + 2,), (0, 0, 3)])
def test_frames_of_other_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    cut = [bytes(3), bytes(MOST_FRAME_BYTES), bytes(1), b""]
    for count in range(len(cut) + 1):
        frames = [memoryview(frame) for frame in cut[:count]]
        if sizes == () and not count:
            continue
        if sizes == (0, 0, 3) and count == 1:
            assert list(map(bytes, parts_of(Head(FrameKind.DATA, 1, 1, {}, sizes), frames))) == [b"", b"", bytes(3)]
            continue
        with pytest.raises(ProtocolError, match="frames"):
            parts_of(Head(FrameKind.DATA, 1, 1, {}, sizes), frames)


@pytest.mark.parametrize("sizes", [(0,) * (MOST_PARTS + 1), (MOST_PART_BYTES + 1,)])
def test_too_many_or_too_large_parts_are_refused_by_both_ends(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="parts"):
        check_sizes(sizes)
    with pytest.raises(ProtocolError, match="parts"):
        unpack(memoryview(pack(Head(FrameKind.DATA, 1, 1, {}, sizes))))


def test_a_head_that_names_more_parts_than_it_has_is_refused() -> None:
    frame = bytearray(pack(HEAD))
    frame[20] = 60
    with pytest.raises(ProtocolError, match="60 parts"):
        unpack(memoryview(frame))
