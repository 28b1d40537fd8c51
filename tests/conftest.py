"""For all tests: Ctrl-C works in children, and who must be alone is, when several run at once.

Ctrl-C works also where the suite itself was started in the background, and ignores it.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Generator
from pathlib import Path
from tempfile import gettempdir

import pytest
from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("on a busy machine too", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("on a busy machine too")
DOOR = Path(gettempdir()) / f"edge-run-tests-{os.getuid()}"  # of all runs of the suite on this machine


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test with the others, or alone: all pass a gate into a room, and who wants it empty keeps the gate shut."""
    is_alone = item.get_closest_marker("alone") is not None
    with open(f"{DOOR}-gate", "w") as gate, open(f"{DOOR}-room", "w") as room:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        if not is_alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:  # closing would not do where a child has the files too
            fcntl.flock(room, fcntl.LOCK_UN)
            fcntl.flock(gate, fcntl.LOCK_UN)
