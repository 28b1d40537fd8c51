"""Which lives of devices a node heard lately: it names them when it announces itself.

So who hears an announcement that names its own life knows that its sender lives: one that was recorded before, and is
played to a device that has started since, names another life. Bounded.
"""

from __future__ import annotations

from collections.abc import Callable

LATELY_S, MOST = 60.0, 256


class HeardLives:
    """The lives of those that were heard in the last minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard_s: dict[str, float] = {}  # the one heard last is the last

    def add(self, life: str) -> None:
        """Note that `life` was heard."""
        self._heard_s.pop(life, None)
        self._heard_s[life] = self._clock()
        if len(self._heard_s) > MOST:
            del self._heard_s[next(iter(self._heard_s))]

    def lives(self) -> tuple[str, ...]:
        """Return who was heard."""
        limit_s = self._clock() - LATELY_S
        self._heard_s = {life: heard_s for life, heard_s in self._heard_s.items() if heard_s >= limit_s}
        return tuple(self._heard_s)
