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
from edge_run.runtime.processes.visitors import Visitors

_Result = TypeVar("_Result")
_LOOK_S = 0.01  # between looks at who is still at work


class Workplace:
    """Has whatever reads or changes the memory of one model done by one thread at a time, and frees it when none does.

    Nothing is held while an answer waits to be asked for its next piece.
    """

    def __init__(
        self, name: object, interrupt: Interrupt, free: Callable[[], object], visitors: Visitors | None = None
    ) -> None:
        """name: what the model is called in errors. interrupt: ends what is done. free: frees the model; idempotent.

        visitors: who reads of it beside who works.
        """
        self._name, self._interrupt, self._free = name, interrupt, free
        self._process = OwnerProcess()
        self._lock = threading.Lock()
        self._inside = set[int]()  # the threads that are at work, or in the moment before
        self._patient = 0  # the thread that is never refused for another one
        self._visitors = visitors or Visitors(name)

    @property
    def is_here(self) -> bool:
        """Whether the model was opened in this process."""
        return self._process.is_here

    def check(self) -> None:
        """Raise NotSupported in a forked child, and ConfigError where the model was closed."""
        self._process.check(self._name)
        self._visitors.check()

    def wait_here(self) -> None:
        """Have the calling thread wait, from here on, where another one is at work, and is refused else."""
        self._patient = threading.get_ident()

    def do(self, work: Callable[[], _Result]) -> _Result:
        """Return what `work` returns. Raises what `check` raises, and ConfigError where a thread is at work.

        Two threads that come in the same moment may both pass the first look: then one waits for the other.
        """
        self.check()
        thread = threading.get_ident()
        if self._lock.locked() and (thread in self._inside or thread != self._patient):
            raise self.refusal()

        def checked() -> _Result:
            self.check()  # again: who closes the model does so when nobody has the lock
            return work()

        return self._alone(checked)

    def forget_cancel(self) -> None:
        """Other work begins here: what was cancelled before does not concern it."""
        self._interrupt.reset()

    def refusal(self, thread: int = 0) -> ConfigError:
        """Return what is told to who comes while a thread is at work: while `thread` is, where that is known."""
        own = threading.get_ident()
        if own == thread or own in self._inside:
            return ConfigError(
                f"{self._name}: is at work already, in the call that this one comes from; ask when that has returned"
            )
        return ConfigError(
            f"{self._name}: is at work in another thread, and serves one at a time; share it with AsyncModel, or guard "
            "it with a lock of your own"
        )

    def close(self, timeout_s: float = math.inf, first: Callable[[], object] = lambda: None) -> None:
        """Let nobody begin any more, cancel what is being done, wait for it, call `first`, and free the model.

        Visitors are waited for too. Nothing is freed under who is still there after the timeout, nor in a forked child.
        Raises ConfigError where this very thread is at work or visits, further up; the model stays open then.
        """
        if not self.is_here:
            return
        thread, until_s = threading.get_ident(), time.monotonic() + timeout_s
        if (self._lock.locked() and thread in self._inside) or thread in self._visitors.inside:
            raise self.refusal(thread)
        self._visitors.close()
        while self._lock.locked() or self._visitors.inside:
            if time.monotonic() >= until_s:
                return
            self._interrupt.cancel()  # again and again: what had just begun has reset it
            time.sleep(_LOOK_S)

        def free() -> None:
            try:
                first()
            finally:
                self._free()

        self._alone(free)

    def _alone(self, work: Callable[[], _Result]) -> _Result:
        """Return what `work` returns. A lock that is taken by `with` is never left locked, wherever Ctrl-C falls."""
        thread = threading.get_ident()
        try:
            self._inside.add(thread)
            with self._lock:
                return work()
        finally:
            self._inside.discard(thread)
