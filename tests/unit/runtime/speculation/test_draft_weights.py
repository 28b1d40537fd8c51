"""Weights of a draft model that are read again: whole, and in pieces between which a stop is heard."""

from __future__ import annotations

import io

import pytest

from edge_run.base.errors import Cancelled, TierReadError
from edge_run.runtime.speculation.draft_weights import READ_BYTES, fill

SIZE = 2 * READ_BYTES + 77


def test_they_are_read_in_pieces_and_a_stop_is_heard_in_between() -> None:
    data, memory, checks = bytes(7) + bytes(range(256)) * (SIZE // 256 + 1), bytearray(SIZE), list[int]()
    fill(io.BytesIO(data), memoryview(memory), 7, lambda: checks.append(1))
    assert memory == data[7 : 7 + SIZE]
    assert len(checks) == 3

    def stop() -> None:
        checks.append(1)
        if len(checks) == 5:
            raise Cancelled("stopped")

    memory = bytearray(SIZE)
    with pytest.raises(Cancelled):
        fill(io.BytesIO(data), memoryview(memory), 7, stop)
    assert memory[:READ_BYTES] == data[7 : 7 + READ_BYTES]
    assert not any(memory[READ_BYTES:])


def test_a_file_that_ends_too_soon_is_said() -> None:
    file = io.BytesIO(bytes(100))
    file.name = "draft.gguf"
    with pytest.raises(TierReadError, match=r"draft.gguf: ends before its weights do"):
        fill(file, memoryview(bytearray(101)), 0, lambda: None)
