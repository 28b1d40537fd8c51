"""For processes under emulation, which are many times slower: their clock is as slow, and no deadline passes too early.

Dates stay right. Sleeping does not take longer, nor what waits in C alone, as sockets do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SLOWER = 20

for name in ("monotonic", "perf_counter"):
    exact: Callable[[], int] = getattr(time, f"{name}_ns")
    setattr(time, f"{name}_ns", lambda exact=exact: exact() // SLOWER)
    setattr(time, name, lambda exact=exact: exact() / (SLOWER * 10**9))
threading._time = time.monotonic  # it was imported before this

_wait = threading.Condition.wait


def _wait_longer(condition: threading.Condition, timeout: float | None = None) -> bool:
    return _wait(condition, timeout and min(timeout * SLOWER, threading.TIMEOUT_MAX))


threading.Condition.wait = _wait_longer
