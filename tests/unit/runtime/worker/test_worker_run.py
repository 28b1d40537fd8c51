"""What ends a pass of a worker early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.errors import Cancelled
from edge_run.base.mesh import Message
from edge_run.runtime.worker.run import WorkerRun


def test_a_stop_that_comes_before_its_command_ends_that_when_it_begins() -> None:
    transport: Any = SimpleNamespace(epoch=3, number=4)
    engine: Any = None
    run = WorkerRun("a", engine, lambda check: transport, "m.gguf")
    stop = Message("a", {"kind": "stop", "epoch": 3, "number": 5})
    for item in (Message("b", stop.header), Message("a", {**stop.header, "epoch": 2})):
        run.overhear(item)
    assert not run.is_ended_by(stop), "another one is in progress"
    transport.number = 5
    assert run.is_ended_by(stop)
    run.check()
    run.overhear(stop)
    with pytest.raises(Cancelled, match="stopped the pass"):
        run.check()
