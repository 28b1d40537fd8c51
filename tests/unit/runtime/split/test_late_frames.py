"""A frame whose time is over is lost, and a matrix may be multiplied by itself."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from edge_run.partition.cuts import Operation
from edge_run.runtime.split.connection import ServerConnection
from edge_run.runtime.split.onnx_file import _multiply_adds
from edge_run.runtime.split.protocol import CODE, LinkLost


def test_no_time_is_left_once_it_is_ones_turn() -> None:
    connection: Any = ServerConnection.__new__(ServerConnection)
    connection._frames, connection._speaking = object(), threading.Lock()
    with pytest.raises(LinkLost, match="in time"):
        connection.ask(CODE, b"", 0.0)
    assert not connection._speaking.locked()


def test_the_square_of_a_matrix() -> None:
    square = Operation("MatMul", ("x",), ("y",))
    assert _multiply_adds(square, {"x": (4, 4), "y": (4, 4)}) == 64
