"""Room that tasks hold and wait for: the key that holds least is next, so that one with many tasks stops no other."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import anyio


@dataclass(eq=False, slots=True)
class _Waiting:
    key: str
    units: int
    priority: int
    number: int
    granted: anyio.Event = field(default_factory=anyio.Event)


class FairRoom:
    """Room of so many units, for the tasks of one event loop."""

    def __init__(self, units: int) -> None:
        self._units = units
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
    ) -> AsyncIterator[None]:
        """Hold so many units in this block, all there are where more are wanted; wait for them before.

        priority: who has a higher one is next, whatever the keys hold. patience_s: how long to wait at most; then the
        block is run without.
        """
        one = _Waiting(key, min(units, self._units), priority, next(self._numbers))
        self._waiting[one] = None
        self._grant()
        try:
            with anyio.move_on_after(patience_s):
                await one.granted.wait()
            self._waiting.pop(one, None)
            yield
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
            one.granted.set()

    def _rank(self, one: _Waiting) -> tuple[int, int, int, int]:
        return -one.priority, self._held[one.key], self._last.get(one.key, -1), one.number

    def _forget(self) -> None:
        present = {key for key, units in self._held.items() if units} | self.waiting_keys
        self._held = Counter({key: self._held[key] for key in present})
        self._last = {key: turn for key, turn in self._last.items() if key in present}
