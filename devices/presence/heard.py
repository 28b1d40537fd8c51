"""The incarnations of devices that a node heard lately, which the node names when it announces itself.

A device that hears an announcement with its own incarnation knows that the sender is there now. An announcement that
was recorded, and is played to a device that has started since, names an earlier incarnation. Bounded.
"""

from __future__ import annotations

from edge_run.base.protocols import Clock

LATELY_S, MOST = 60.0, 256


class HeardIncarnations:
    """The incarnations that were heard in the last minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard_s: dict[str, float] = {}  # the one heard last is the last

    def add(self, incarnation: str) -> None:
        """Note that `incarnation` was heard."""
        self._heard_s.pop(incarnation, None)
        self._heard_s[incarnation] = self._clock()
        if len(self._heard_s) > MOST:
            del self._heard_s[next(iter(self._heard_s))]

    def incarnations(self) -> tuple[str, ...]:
        """Return who was heard."""
        limit_s = self._clock() - LATELY_S
        self._heard_s = {incarnation: heard_s for incarnation, heard_s in self._heard_s.items() if heard_s >= limit_s}
        return tuple(self._heard_s)
