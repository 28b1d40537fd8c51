"""Who reads of an open model beside who works on it: any thread may, until the model is closed, which waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from edge_run.base.errors import ConfigError

_Result = TypeVar("_Result")


class Visitors:
    """The threads that are reading. Thread-safe; none waits for another.

    Each visit has a lock of its own, which `with` gives back wherever Ctrl-C falls.
    """

    def __init__(self, name: object) -> None:
        """name: what the model is called in errors."""
        self._name, self._is_closed = name, False
        self._visits = set[tuple[int, threading.Lock]]()  # each with its thread

    def check(self) -> None:
        """Raise ConfigError where the model was closed."""
        if self._is_closed:
            raise ConfigError(f"{self._name}: this model was closed; open it again with Model(...)")

    def visit(self, read: Callable[[], _Result]) -> _Result:
        """Return what `read` returns, under which nothing is freed. Raises what `check` raises."""
        visit = threading.get_ident(), threading.Lock()
        try:
            self._visits.add(visit)
            with visit[1]:
                self.check()  # once the lock is to be seen: who closes says so first, and then looks for locks
                return read()
        finally:
            self._visits.discard(visit)

    def close(self) -> None:
        """Let nobody in any more; who is in stays. Idempotent."""
        self._is_closed = True

    @property
    def inside(self) -> list[int]:
        """The threads of the visits that have not ended; after `close`, nothing may be freed before there are none."""
        return [thread for thread, lock in list(self._visits) if lock.locked()]
