"""The run that a worker takes part in, and what ends a pass of it before it is done."""

from __future__ import annotations

from dataclasses import dataclass

from edge_run.base.errors import Cancelled, DeviceLost
from edge_run.base.mesh import Message
from edge_run.runtime.mesh.transport import LinkWire


@dataclass(slots=True)
class WorkerRun:
    """Of a worker's run: who coordinates, under which epoch, and how far it is.

    done: the latest command that was begun. stopped: the latest that its coordinator stopped. is_over: the coordinator
    is gone, or has a later plan.
    """

    coordinator: str
    epoch: int
    wire: LinkWire
    done: int = 0
    stopped: int = -1
    is_over: bool = False

    def check(self) -> None:
        """Raise Cancelled where the pass in progress is nobody's any more."""
        if self.is_over:
            raise Cancelled("the run has ended, or has a later plan")
        if self.stopped == self.wire.number:
            raise Cancelled("the coordinator has stopped the pass")

    def is_ended_by(self, item: Message | DeviceLost) -> bool:
        """Return whether the pass in progress ends with what came over the link, and remember what was stopped.

        A stop may come before its command is begun: then it ends at its first node. On a thread of the link's.
        """
        if isinstance(item, DeviceLost):
            return item.figures.get("node") == self.coordinator
        number = item.header.get("number")
        is_ours = item.node == self.coordinator and item.header.get("epoch") == self.epoch
        if not is_ours or item.header.get("kind") != "stop" or not isinstance(number, int):
            return False
        self.stopped = number
        return number == self.wire.number
