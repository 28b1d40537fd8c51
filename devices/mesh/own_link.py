"""Where others reach this device's data link, looked up anew now and then: a network may come late, or change."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from edge_run.base.fields import Document
from edge_run.base.protocols import Clock
from edge_run.devices.mesh.state import MeshState

LOOK_S = 60.0


class OwnLink:
    """Has it announced where others reach the data link, whenever that is another place. Guarded by its owner."""

    def __init__(self, find: Callable[[], Document], clock: Clock = time.monotonic) -> None:
        """`find` returns where others reach it now, as `bodies.peer_of` reads it."""
        self._find, self._clock = find, clock
        self._due_s = 0.0

    def look_soon(self) -> None:
        """Look at the next moment: this device is connected anew, perhaps to another network."""
        self._due_s = 0.0

    def tell(self, state: MeshState) -> None:
        """Look where that is due, and have `state` announce what is new."""
        if self._clock() < self._due_s:
            return
        self._due_s = self._clock() + LOOK_S
        with contextlib.suppress(OSError):  # no files are left now
            link = self._find()
            if link != state.link:
                state.describe(state.capabilities, link)
                state.announce()
