"""Watches the memory limits of this process's control groups, which may fall, and rise again, while a model runs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from edge_run.base.protocols import Clock
from edge_run.devices.host.memory import MemoryGroup, memory_groups, room_bytes

PERIOD_S = 1.0  # in which limits are read once at most


class LimitWatch:
    """Tells how much less than was granted this process may hold, since a limit fell. Not thread-safe.

    Only limits that are lower than they were at first count: a budget was granted beside those.
    """

    def __init__(
        self, granted_bytes: int, groups: Sequence[MemoryGroup] | None = None, clock: Clock = time.monotonic
    ) -> None:
        """Watch `groups`, by default all that this process is in. granted_bytes: what it may hold in all."""
        self._granted_bytes, self._clock = granted_bytes, clock
        self._groups = tuple(memory_groups() if groups is None else groups)
        self._limits = self._first_limits = self._read()
        self._looked_s, self._lacking_bytes = clock(), 0

    def lacking_bytes(self) -> int:
        """Return how much less it may hold now; 0 while no limit is in the way."""
        now_s = self._clock()
        if now_s - self._looked_s >= PERIOD_S:
            self._looked_s = now_s
            if (limits := self._read()) != self._limits:
                self._limits = limits
                self._lacking_bytes = max(0, self._granted_bytes - self._room_bytes())
        return self._lacking_bytes

    def _read(self) -> list[int | None]:
        return [group.limit_bytes for group in self._groups]

    def _room_bytes(self) -> int:
        """Return what those groups leave this process whose limits fell; what was granted where none did."""
        rooms = [self._granted_bytes]
        for group, first, now in zip(self._groups, self._first_limits, self._limits, strict=True):
            if now is not None and (first is None or now < first) and (room := room_bytes(group)) is not None:
                rooms.append(room)
        return min(rooms)
