"""Room that tasks hold and wait for: the key that holds least is next, so that one with many tasks stops no other."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import anyio

from edge_run.base.protocols import Clock


@dataclass(eq=False, slots=True)
class _Waiting:
    key: str
    units: int
    priority: int
    number: int
    arrived_s: float
    granted: anyio.Event = field(default_factory=anyio.Event)


class FairRoom:
    """Room of so many units, for the tasks of one event loop."""

    def __init__(self, units: int, aging_s: float = math.inf, clock: Clock = time.monotonic) -> None:
        """aging_s: for each so many seconds without anything for its key and priority, one that waits rises by 1."""
        self._units, self._aging_s, self._clock = units, aging_s, clock
        self._granted_s = dict[tuple[str, int], float]()  # by key and priority: when one was let in last
        self._held = Counter[str]()  # by key
        self._waiting: dict[_Waiting, None] = {}
        self._last = dict[str, int]()  # of the keys that are here: when they were given something last
        self._numbers = itertools.count()

    def n_waiting(self, key: str | None = None) -> int:
        """Return how many tasks wait; of a key, if one is named."""
        return sum(key in (None, one.key) for one in self._waiting)

    @property
    def waiting_keys(self) -> frozenset[str]:
        """The keys whose tasks wait."""
        return frozenset(one.key for one in self._waiting)

    @contextlib.asynccontextmanager
    async def held(
        self, key: str = "", units: int = 1, priority: int = 0, patience_s: float | None = None
    ) -> AsyncIterator[bool]:
        """Hold so many units in this block, all there are where more are wanted; wait for them before.

        Whether they are held is what it gives the block.

        priority: who has a higher one is next, whatever the keys hold. patience_s: how long to wait at most; then the
        block is run without.
        """
        one = _Waiting(key, min(units, self._units), priority, next(self._numbers), self._clock())
        self._waiting[one] = None
        self._grant()
        try:
            with anyio.move_on_after(patience_s):
                await one.granted.wait()
            self._waiting.pop(one, None)
            yield one.granted.is_set()
        finally:
            if one.granted.is_set():
                self._held[key] -= one.units
            self._waiting.pop(one, None)
            self._forget()
            self._grant()

    def _grant(self) -> None:
        """Let those in that are next, as long as there is room for the very next one."""
        while self._waiting:
            one = min(self._waiting, key=self._rank)
            if self._held.total() + one.units > self._units:
                return
            del self._waiting[one]
            self._held[one.key] += one.units
            self._last[one.key] = next(self._numbers)
            self._granted_s[one.key, one.priority] = self._clock()
            one.granted.set()

    def _rank(self, one: _Waiting) -> tuple[float, int, int, int]:
        since_s = max(one.arrived_s, self._granted_s.get((one.key, one.priority), one.arrived_s))
        risen = one.priority + (self._clock() - since_s) // self._aging_s
        return -risen, self._held[one.key], self._last.get(one.key, -1), one.number

    def _forget(self) -> None:
        present = {key for key, units in self._held.items() if units} | self.waiting_keys
        self._held = Counter({key: self._held[key] for key in present})
        self._granted_s = {one: when_s for one, when_s in self._granted_s.items() if one[0] in present}
        self._last = {key: turn for key, turn in self._last.items() if key in present}
