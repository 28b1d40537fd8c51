"""The sources of time and chance of a device in a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from edge_run.base.protocols import Clock


@dataclass(frozen=True, slots=True)
class Clocks:
    """Two clocks, and a source of chance.

    steady: returns seconds that only grow.
    wall: returns seconds since 1970.
    random: the source of chance.
    """

    steady: Clock
    wall: Clock
    random: Random
