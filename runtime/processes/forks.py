"""Keeps a forked child from using the models of its parent, whose memory and threads are not in the child.

The child gets an error instead, frees nothing of the parent's, and may open models of its own. For that, compute
threads rest before each fork: a child would wait for its parent's threads for ever.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from edge_run.base.errors import NotSupported


class OwnerProcess:
    """The process that something was opened in."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether that is this process."""
        return os.getpid() == self._pid

    def check(self, what: object) -> None:
        """Refuse `what` in a forked child. Raises NotSupported."""
        if not self.is_here:
            raise NotSupported(
                f"{what}: was opened by process {self._pid}, of which this one ({os.getpid()}) is a fork, and models "
                "are not forked; open it in this process",
            )


def forkable_lock() -> threading.Lock:
    """Return a lock that is free in a forked child, even if a thread of the parent holds it."""
    lock = threading.Lock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


def before_forks(rest: Callable[[], None]) -> None:
    """Call `rest` before each fork of this process, on systems with forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=rest)
