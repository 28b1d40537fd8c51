"""The one way to end work before it is done: a signal or a caller's cancel is noted here, and whoever works asks.

Nothing is raised where the interpreter happens to be: from within a callback of llama.cpp's it would be lost, and the
weights of a node with it. That holds for Ctrl-C and for what a program's own handlers raise, such as `sys.exit` on
SIGTERM. And no thread is left at work on memory that is about to be freed (`join_all`).

Where Ctrl-C does raise, between passes, no lock may stay taken. So locks are taken by themselves (`with self._lock`),
never through a `Condition` on them: its `__enter__` is Python, within which the lock is taken and no `with` gives it
back yet.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from edge_run.base.errors import Cancelled, of_a_signal

CHECK_S = 0.1  # between checks of who waits
INSISTENCE = 3  # so often Ctrl-C comes from who does not want to wait
_signals = importlib.import_module("_signal")  # those of `signal` make enums of handlers, ten times as slow
_handler, _set_handler = _signals.getsignal, _signals.signal


@contextlib.contextmanager
def on_ctrl_c(action: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C call `action` in this block, instead of raising KeyboardInterrupt where that is what it does."""
    is_main = threading.current_thread() is threading.main_thread()
    before = _handler(signal.SIGINT) if is_main else None
    if before is not signal.default_int_handler:  # ignored, as in a background job, or somebody else's: leave it so
        yield
        return
    _set_handler(signal.SIGINT, lambda number, frame: action())
    try:
        yield
    finally:
        _set_handler(signal.SIGINT, before)


class _Keeper:
    """Handles a signal as `before` does; what that raises `keep` gets, until the block that this is for has ended."""

    def __init__(self, before: Callable[..., object], keep: Callable[[BaseException], None]) -> None:
        self.before, self._keep = before, keep
        self.has_ended = False

    def __call__(self, number: int, frame: object) -> None:
        try:
            self.before(number, frame)
        except BaseException as error:
            if self.has_ended:  # somebody took it for the program's own, and put it back
                raise
            self._keep(error)


@contextlib.contextmanager
def _keeping_signals(keep: Callable[[BaseException], None]) -> Iterator[None]:
    """Let `keep` get what handlers of signals raise in this block, unless an outer block's does already."""
    keepers = list[tuple[int, _Keeper]]()
    try:
        if threading.current_thread() is threading.main_thread():
            for number in range(1, signal.NSIG):
                before = _handler(number)
                if not callable(before) or (isinstance(before, _Keeper) and not before.has_ended):
                    continue  # ignored, or no handler of Python's, or an outer block's
                keepers.append((number, _Keeper(before, keep)))
                _set_handler(*keepers[-1])
        yield
    finally:
        _put_back(keepers)


def _put_back(keepers: list[tuple[int, _Keeper]]) -> None:
    """Put the handlers back that were there before, but where the program has set another one meanwhile."""
    try:
        while keepers:
            number, keeper = keepers[-1]
            if _handler(number) is keeper:
                _set_handler(number, keeper.before)
            keeper.has_ended = True
            keepers.pop()
    finally:
        if keepers:  # one that is back was called, and raised
            _put_back(keepers)


class JoinedThread(threading.Thread):
    """A daemon thread for `join_all`. has_ended: it is done with all that is ours."""

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.has_ended = threading.Event()

    def run(self) -> None:
        """Do the work."""
        try:
            super().run()
        finally:
            self.has_ended.set()


def join_all(
    threads: Iterable[JoinedThread],
    give_up: Callable[[], object] = lambda: None,
    hangs: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until all `threads` have ended, whatever is raised meanwhile, such as Ctrl-C: that is raised afterwards.

    give_up: is called where something was raised, once or more often, and has the threads leave what they have not
        begun.
    hangs: is asked meanwhile, and once it is true, threads that have not ended are left.

    The third time it is raised at once: a drive may hang. Before Python 3.13, `Thread.join` cannot do this: once it was
    interrupted, it takes the thread for ended.
    """
    left, raised = list(threads), list[BaseException]()
    while left:
        try:
            if raised:
                give_up()
            while not left[-1].has_ended.wait(CHECK_S):
                if hangs():
                    left.clear()
                    break
            else:
                left[-1].join()
                left.pop()
        except BaseException as error:
            raised.append(error)
            if len(raised) == INSISTENCE:
                raise
    if raised:
        raise raised[-1]


def go_on() -> None:
    """Raise nothing: the check of work that nobody stops."""


def wait_checking(
    changed: threading.Condition, is_so: Callable[[], object], timeout_s: float, check: Callable[[], None]
) -> None:
    """Wait as `changed.wait_for` does. `check` runs meanwhile, and may raise to stop."""
    until_s = time.monotonic() + timeout_s
    while not changed.wait_for(is_so, max(0.0, min(CHECK_S, until_s - time.monotonic()))):
        check()
        if time.monotonic() >= until_s:
            return


class Interrupt:
    """Whether the work at hand is to end. Any thread may cancel it; one at a time works, and asks.

    To end the opening of a model from another thread, give one to `Model(path, interrupt=...)` and call `cancel`.
    """

    def __init__(self) -> None:
        self._is_cancelled = False
        self._raised: BaseException | None = None  # by the handler of a signal
        self._hear: Callable[[bool], None] = lambda is_set: None

    @property
    def is_set(self) -> bool:
        """Whether the work at hand is to end."""
        return self._is_cancelled or self._raised is not None

    def tell(self, hear: Callable[[bool], None]) -> None:
        """Have `hear` told whenever that changes, on whatever thread; it must not wait."""
        self._hear = hear

    def cancel(self) -> None:
        """End the work at hand; from any thread."""
        self._is_cancelled = True
        self._say()

    def reset(self) -> None:
        """Other work begins: what was cancelled before does not concern it. Signals do."""
        self._is_cancelled = False
        self._say()

    def _say(self) -> None:
        """Tell whether it is set; again where another thread has changed that meanwhile, and was told first."""
        while True:
            said = self.is_set
            self._hear(said)
            if said == self.is_set:
                return

    def check(self) -> None:
        """Raise Cancelled where the work at hand is to end."""
        if self.is_set:
            raise Cancelled("the pass was cancelled")

    @contextlib.contextmanager
    def cancelling_at(self, until_s: float) -> Iterator[None]:
        """Cancel what is done in this block where it is still done at `until_s`, as `time.monotonic` counts.

        What is over a century away, half of what a thread can wait for, is never.
        """
        if until_s - time.monotonic() > threading.TIMEOUT_MAX / 2:
            yield
            return
        is_over = threading.Event()

        def cancel() -> None:
            if not is_over.wait(max(0.0, until_s - time.monotonic())):
                self.cancel()

        watch = threading.Thread(target=cancel, name="edge-run-deadline", daemon=True)
        try:
            watch.start()
            yield
        finally:
            is_over.set()
            with contextlib.suppress(RuntimeError):  # Ctrl-C came before it was started
                watch.join()

    @contextlib.contextmanager
    def hearing_signals(self) -> Iterator[None]:
        """Note what handlers of signals raise in this block, as that of Ctrl-C does; at its end, raise it."""

        def note(error: BaseException) -> None:
            if self._raised is None or (isinstance(self._raised, Exception) and not isinstance(error, Exception)):
                self._raised = of_a_signal(error)  # the first, unless another one is to end the program
            self._say()

        ended_by: BaseException | None = None
        try:
            with _keeping_signals(note):
                yield
        except BaseException as error:
            ended_by = error
        if self._raised is not None:  # asked once nothing can set it any more
            raised, self._raised = self._raised, None
            self._say()
            raise raised
        if ended_by is not None:
            raise ended_by
