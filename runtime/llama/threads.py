"""How many threads compute."""

from __future__ import annotations

import os

from edge_run.devices.host.machine import machine_cores


def compute_threads(wanted: int | None) -> int:
    """Return the threads to compute with: as asked, or one per physical core that this process may use."""
    if wanted:
        return wanted
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, machine_cores() or usable))
