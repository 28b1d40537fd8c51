"""How many threads compute."""

from __future__ import annotations

from edge_run.devices.host.machine import usable_cores


def compute_threads(wanted: int | None) -> int:
    """Return the threads to compute with: as asked, or one for each core that may compute all the time."""
    return wanted or usable_cores().at_once
