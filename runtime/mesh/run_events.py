"""The events of a mesh while a run computes: those that end a pass end it at once, the others are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from edge_run.base.errors import DeviceLost
from edge_run.base.fields import MOST_COUNT
from edge_run.base.mesh import HasLeft, Joined, Lost, Mesh, MeshEvent, Named, Unled, add_event, names_apart

LED_BY_ANOTHER = "another device leads the mesh now"


class LeaseLost(DeviceLost):
    """Another coordinator leads, or this device leads nobody any more."""


class RunEvents:
    """The events of a mesh, in their order, until the run has time for them. Not thread-safe.

    That this device has left its mesh is told as the end of any lease: it computes alone from then on.

    why_unled: why a lease ended.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._kept: list[MeshEvent] = []
        self.why_unled = LED_BY_ANOTHER
        self._seen = {member.node: Named(member.node, member.name) for member in mesh.members()}

    def check(self, others: Collection[str], lease: int) -> None:
        """Raise DeviceLost where one of `others` is gone, LeaseLost where `lease` is; keep everything else."""
        events = self._hear()
        for number, event in enumerate(events):
            later = events[number + 1 :]  # a device that was started anew is there again
            if isinstance(event, Lost) and event.node in others:
                self._keep(later)
                raise DeviceLost(event.why, node=event.node)
            if others and is_end_of_lease(event, lease):
                self._keep(later)
                raise LeaseLost(self.why_unled)
            self._keep([event])

    def take_end_of_lease(self, lease: int) -> bool:
        """Return whether `lease` has ended as far as was heard; what said so is kept no more."""
        self._keep(self._hear())
        n_heard = len(self._kept)
        self._kept = [event for event in self._kept if not is_end_of_lease(event, lease)]
        return len(self._kept) < n_heard

    def take(self) -> Iterator[MeshEvent]:
        """Yield what has happened since the last call; what is not taken is kept."""
        self._keep(self._hear())
        while self._kept:
            yield self._kept.pop(0)

    def take_returns(self) -> set[str]:
        """Return the devices that were lost and are there again, as far as was heard; their loss is told no more."""
        self._keep(self._hear())
        joined = {event.member.node for event in self._kept if isinstance(event, Joined)}  # after any loss that is kept
        losses = [event for event in self._kept if isinstance(event, Lost) and event.node in joined]
        self._kept = [event for event in self._kept if event not in losses]
        return {event.node for event in losses}

    @property
    def names(self) -> dict[str, str]:
        """What people call the devices that were ever seen, by their ids."""
        return names_apart(self._seen.values())

    def _hear(self) -> Sequence[MeshEvent]:
        try:
            return self._mesh.wait(timeout_s=0.0)
        except HasLeft as error:
            self.why_unled = error.message
            return (Unled(MOST_COUNT),)

    def _keep(self, events: Iterable[MeshEvent]) -> None:
        for event in events:
            if isinstance(event, Joined):
                self._seen[event.member.node] = Named(event.member.node, event.member.name)
            add_event(self._kept, event)


def is_end_of_lease(event: MeshEvent, lease: int) -> bool:
    """Return whether `event` says that the lease of epoch `lease` has ended."""
    return isinstance(event, Unled) and event.epoch >= lease
