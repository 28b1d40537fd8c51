"""Finds what an error of a pass means for the run: which device is gone or fails, and which device says so."""

from __future__ import annotations

from collections.abc import Sequence

from edge_run.base.errors import DeviceLost, EdgeRunError, KernelError, ProtocolError, lacks_room
from edge_run.base.mesh import HasLeft
from edge_run.runtime.mesh.failover import Apart, Deposed, Event, GaveUp, Gone, LessRoom, OfLate, Refused
from edge_run.runtime.mesh.orders import RunOrders
from edge_run.runtime.mesh.run_events import LeaseLost
from edge_run.runtime.mesh.transport import Overdue, PassFailed, RunEnded, Unreached
from edge_run.runtime.slices.slice import NotNumbers

FAULTS = (DeviceLost, PassFailed, ProtocolError, NotNumbers)  # which another device may be left out for


class Blame:
    """Finds the device that caused an error. `node` is this device. Not thread-safe."""

    def __init__(self, node: str, orders: RunOrders) -> None:
        """orders: to devices, which are asked what they do."""
        self._node, self._orders = node, orders
        self._tellers: OfLate[str] = OfLate()  # of whom each has said that it did wrong, or is away
        self._unreached: OfLate[str] = OfLate()  # who has said of each that it is away, though it is there

    def event_of(self, error: EdgeRunError, others: Sequence[str]) -> Event:
        """Return what `error` means for a run with `others`. Raises it where it is this device's own."""
        node = error.node if isinstance(error, FAULTS) else ""
        if isinstance(error, LeaseLost | HasLeft):  # who has left goes on alone, as it cannot lead
            return Deposed(error.message)
        if isinstance(error, Overdue):
            return self._orders.who_is_stuck(others)
        if isinstance(error, RunEnded):
            return GaveUp(node, error.message)
        if isinstance(error, NotNumbers):
            return self._event_of_nan(error)
        met = error.__cause__ if isinstance(error, PassFailed) else error
        if others and isinstance(met, EdgeRunError) and lacks_room(met):
            return LessRoom(node or self._node, met)
        teller = error.teller if isinstance(error, PassFailed | Unreached) else ""
        if isinstance(error, PassFailed | Unreached) and teller and (found := self._event_of_told(error)) is not None:
            return found
        if isinstance(error, PassFailed | ProtocolError):
            return Refused(node or (*others, "")[0], error.message, teller)
        if isinstance(error, DeviceLost) and node:
            return Gone(node, error.message, teller)
        raise error

    def _event_of_told(self, error: PassFailed | Unreached) -> Event | None:
        """Return what it means that a device says it of another one, where that is not simply believed.

        Of two devices that are there, and do not reach each other, the one is to blame that does not reach a second
        one, or is not reached by a second one.
        """
        if isinstance(error, Unreached) and (missing := self._orders.who_is_missing([error.node])) is not None:
            return missing
        self._tellers.note(error.teller, error.node)
        if len(set(self._tellers.of(error.teller))) > 1:
            why = f"it blames one device after another; the last time: {error.message}"
            return Refused(error.teller, why, is_for_now=isinstance(error, Unreached))
        if isinstance(error, PassFailed):
            return None
        self._unreached.note(error.node, error.teller)
        return Apart(error.teller, error.node) if len(set(self._unreached.of(error.node))) == 1 else None

    def _event_of_nan(self, error: NotNumbers) -> Event:
        """Return who is to blame for what is no number here. Raises KernelError where nobody else can be."""
        node = error.after if error.node == self._node else error.node
        if not node:
            raise KernelError(
                f"{error}: the weights or the computation are damaged; copy or download the model again"
            ) from error
        return Refused(node, f"{error}, after what it handed over")
