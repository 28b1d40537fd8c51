"""How many threads compute."""

from __future__ import annotations

import os


def compute_threads(wanted: int | None) -> int:
    """Return the threads to compute with: as asked, or one per physical core that this process may use."""
    if wanted:
        return wanted
    import psutil  # which takes long to load

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))
