"""The sources of time and chance of a device in a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Clocks:
    """Two clocks, and a source of chance.

    steady: returns seconds that only grow.
    wall: returns seconds since 1970.
    random: the source of chance.
    """

    steady: Callable[[], float]
    wall: Callable[[], float]
    random: Random
