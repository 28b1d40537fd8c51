"""Where an open model is worked on: by one thread at a time, of the process that opened it, until it is closed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from edge_run.base.errors import ConfigError
from edge_run.base.interrupt import Interrupt
from edge_run.runtime.processes.forks import OwnerProcess

_Result = TypeVar("_Result")
_LOOK_S = 0.01  # between looks at who is still at work


class Workplace:
    """Has whatever reads or changes the memory of one model done by one thread at a time, and frees it when none does.

    Nothing is held while an answer waits to be asked for its next piece.
    """

    def __init__(self, name: object, interrupt: Interrupt, free: Callable[[], object]) -> None:
        """name: what the model is called in errors. interrupt: ends what is done. free: frees the model; idempotent."""
        self._name, self._interrupt, self._free = name, interrupt, free
        self._process = OwnerProcess()
        self._lock = threading.Lock()
        self._thread = 0  # the last one that was at work
        self._is_closed = False

    @property
    def is_here(self) -> bool:
        """Whether the model was opened in this process."""
        return self._process.is_here

    def check(self) -> None:
        """Raise NotSupported in a forked child, and ConfigError where the model was closed."""
        self._process.check(self._name)
        if self._is_closed:
            raise ConfigError(f"{self._name}: this model was closed; open it again with Model(...)")

    def do(self, work: Callable[[], _Result]) -> _Result:
        """Return what `work` returns. Raises what `check` raises, and ConfigError where a thread is at work.

        Two threads that come in the same moment may both pass the first look: then one waits for the other. A lock
        that is taken by `with` is never left locked, wherever Ctrl-C falls.
        """
        self.check()
        if self._lock.locked():
            raise self.refusal()
        thread = threading.get_ident()
        with self._lock:
            self._thread = thread
            self.check()  # again: who closes the model does so when nobody has the lock
            return work()

    def refusal(self) -> ConfigError:
        """Return what is told to who comes while a thread is at work."""
        if self._thread == threading.get_ident():
            return ConfigError(
                f"{self._name}: is at work already, in the call that this one comes from; ask when that has returned"
            )
        return ConfigError(
            f"{self._name}: is at work in another thread, and serves one at a time; share it with AsyncModel, or guard "
            "it with a lock of your own"
        )

    def end(self, timeout_s: float = math.inf) -> bool:
        """Let nobody begin any more, cancel what is being done, and wait for it; return whether nobody is at work.

        In a forked child that is never so. Raises ConfigError where this very thread is at work, further up.
        """
        if not self.is_here:
            return False
        self._is_closed, until_s = True, time.monotonic() + timeout_s
        while self._lock.locked():
            if self._thread == threading.get_ident():
                raise self.refusal()
            if time.monotonic() >= until_s:
                return False
            self._interrupt.cancel()  # again and again: what had just begun has reset it
            time.sleep(_LOOK_S)
        return True

    def close(self, timeout_s: float = math.inf) -> None:
        """End what is being done as `end` does, and free the model; nothing is freed under who is still at work."""
        if self.end(timeout_s):
            self._free()
