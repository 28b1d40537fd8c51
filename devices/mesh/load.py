"""Reports how busy this device is, at most once a second, to the other members and to Home Assistant if asked to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from edge_run.base.fields import Document, JsonValue
from edge_run.base.mesh import LinkRate
from edge_run.base.protocols import Clock
from edge_run.devices.mesh.home_assistant import HomeAssistant

EVERY_S, HOME_EVERY_S = 1.0, 45.0


class LoadReport:
    """The latest load, and when it is to be reported again. Guarded by its owner."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._load: Document = {}
        self._until_s = math.inf  # when it is over
        self._said_s, self._is_due = clock() - EVERY_S, False
        self._home: HomeAssistant | None = None

    def set(self, load: Document, lasts_s: float | None = None) -> None:
        """Say `load` soon, and in `lasts_s`, where nothing else was said until then, that it is over."""
        self._load, self._is_due = load, True
        self._until_s = math.inf if lasts_s is None else self._clock() + lasts_s

    def repeat(self) -> None:
        """Say it again soon: what was measured of links is new."""
        self._is_due = True

    def show_to(self, home: HomeAssistant) -> None:
        """Show it to Home Assistant from now on."""
        self._home = home
        self.introduce()
        self.repeat()

    def introduce(self) -> None:
        """Tell Home Assistant of this device, where it is to see it: it may have forgotten."""
        if self._home is not None:
            self._home.introduce()

    def pass_time(self) -> None:
        """Have it said that the load is over, where it is by now."""
        if self._clock() >= self._until_s:
            self.set({})

    def wait_s(self) -> float:
        """Return in how many seconds it is to be said; infinitely many when there is nothing to say."""
        since_s = self._clock() - self._said_s
        if not self._is_due and (self._home is None or since_s < HOME_EVERY_S):
            return math.inf
        return max(0.0, EVERY_S - since_s)

    def take(self, rates: Mapping[str, LinkRate], members: int) -> Document:
        """Return what is to be said now, with what was measured of links; Home Assistant is shown it."""
        self._is_due, self._said_s = False, self._clock()
        self.show(members, is_present=True)
        links: dict[str, JsonValue] = {node: dataclasses.asdict(rate) for node, rate in rates.items()}
        return {**self._load, "links": links}

    def show(self, members: int, *, is_present: bool) -> None:
        """Show it to Home Assistant, where it is to see it."""
        if self._home is not None:
            self._home.show(self._load, members, is_present=is_present)
