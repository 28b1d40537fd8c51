"""A run that a worker takes part in, and the conditions that end a pass of it early."""

from __future__ import annotations

from collections.abc import Callable

from edge_run.base.errors import Cancelled, DeviceLost
from edge_run.base.mesh import Message
from edge_run.runtime.mesh.transport import LinkTransport
from edge_run.runtime.slices.engine import SliceEngine


class WorkerRun:
    """What a worker knows of a run.

    coordinator: the device that the run is of.
    model: what the coordinator calls the model.
    engine: the slice that is computed here.
    transport: of the activations and commands of the run.
    done: the latest command that was begun.
    is_over: the coordinator is gone, or has a later plan.
    """

    def __init__(
        self,
        coordinator: str,
        engine: SliceEngine,
        make_transport: Callable[[Callable[[], None]], LinkTransport],
        model: str,
    ) -> None:
        """make_transport: makes it of a function that it is to call while it waits, and that may raise to stop."""
        self.coordinator, self.engine, self.model = coordinator, engine, model
        self.done, self.is_over = 0, False
        self._stopped = -1  # the latest command that its coordinator stopped
        self.transport = make_transport(self.check)

    @property
    def epoch(self) -> int:
        """Under which the run is."""
        return self.transport.epoch

    def begin(self, number: int) -> None:
        """Command `number` is carried out from now on."""
        self.transport.expect(number)
        self.done = number

    def end(self) -> None:
        """The pass in progress, and all that would follow, is nobody's any more."""
        self.is_over = True

    def check(self) -> None:
        """Raise Cancelled where the pass in progress is nobody's any more."""
        if self.is_over:
            raise Cancelled("the run has ended, or has a later plan")
        if self._stopped == self.transport.number:
            raise Cancelled("the coordinator has stopped the pass")

    def overhear(self, item: Message | DeviceLost) -> None:
        """Remember what was stopped by what came over the link, on a thread of the link's.

        A stop may come before its command is begun: then that ends at its first node.
        """
        if (number := self._stopped_by(item)) is not None:
            self._stopped = number

    def is_ended_by(self, item: Message | DeviceLost) -> bool:
        """Return whether the pass in progress ends with what came over the link. On a thread of the link's."""
        if isinstance(item, DeviceLost):
            return item.node == self.coordinator
        return self._stopped_by(item) == self.transport.number

    def _stopped_by(self, item: Message | DeviceLost) -> int | None:
        """Return the command of this run that is stopped by what came; None where none is."""
        if isinstance(item, DeviceLost) or item.node != self.coordinator or item.header.get("epoch") != self.epoch:
            return None
        number = item.header.get("number")
        return number if item.header.get("kind") == "stop" and isinstance(number, int) else None
