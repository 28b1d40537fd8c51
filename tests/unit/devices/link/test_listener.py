"""The socket on which the data link listens: who is cut off, by descriptors that may be others' by then."""

from __future__ import annotations

import os
import socket
from typing import Any

from edge_run.devices.link.listener import LinkListener


def test_a_descriptor_that_is_no_connection_any_more_is_left_as_it_is() -> None:
    listener: Any = LinkListener.__new__(LinkListener)
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull, "rb") as other:
        listener._connections = {other.fileno(): "a", ours.fileno(): "a"}
        before = len(os.listdir("/proc/self/fd"))
        listener.cut("a")
        assert len(os.listdir("/proc/self/fd")) == before
        assert other.read() == b""
        assert theirs.recv(1) == b"", "it is shut down"
