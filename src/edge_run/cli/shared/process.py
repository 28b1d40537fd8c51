"""What the command line does to its process: streams that do not fail late, and signals that end it quietly."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from edge_run.base.fields import plain
from edge_run.base.files.drafts import remove_drafts
from edge_run.cli.shared.printable import LogFormatter, PrintableStream

try:
    import termios
except ImportError:  # not a POSIX system
    termios = None  # type: ignore[assignment]

MOST_LAST_WORDS = 10_000  # letters: what to do comes last, after paths
LAST_THREADS_S = 1.0  # for those that are about to end
_cleanups: list[Callable[[], None]] = []


def prepare_streams() -> None:
    """Open what was closed (or a file of ours would become standard output), and let no character fail."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


@contextlib.contextmanager
def printable_notices() -> Iterator[None]:
    """Let nothing reach standard error raw in this block, whoever writes: the log, a thread that fails, a library."""
    before, last_resort = sys.stderr, logging.lastResort
    if before is not None:
        sys.stderr = PrintableStream(before)
    if last_resort is not None:
        last_resort.setFormatter(LogFormatter())
    try:
        yield
    finally:
        sys.stderr = before


def release_streams() -> None:
    """Flush the streams, and let go of one that fails: Python would flush it again at its end, and complain."""
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def leave_threads(code: int) -> None:
    """End the process here where threads are left that Python would wait for, as for one that a drive keeps.

    Such are of libraries' pools, and left where Ctrl-C came so often that nobody waited for them.
    """
    until_s = time.monotonic() + LAST_THREADS_S
    left = [one for one in threading.enumerate() if not one.daemon and one is not threading.current_thread()]
    with contextlib.suppress(KeyboardInterrupt):
        for thread in left:
            thread.join(max(0.0, until_s - time.monotonic()))
    if any(thread.is_alive() for thread in left):
        remove_drafts()
        os._exit(code)


def end_on_termination() -> None:
    """Let SIGTERM and SIGHUP run the cleanups, remove unfinished files and end the process at once.

    The exit code is 128 and the signal's number.

    Nothing is raised: an exception could surface in a callback of llama.cpp's, where it is lost.
    """
    modes = _terminal_modes()

    def end(number: int, frame: FrameType | None) -> None:
        _restore(modes)
        for cleanup in reversed(_cleanups):
            with contextlib.suppress(Exception):
                cleanup()
        remove_drafts()
        os._exit(128 + number)

    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP: so do we
            signal.signal(number, end)


def end_with(message: str, code: int) -> NoReturn:
    """Write one line and end the process at once, from wherever it is: what it computes in may be broken."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{plain(message, MOST_LAST_WORDS)}\n".encode("utf-8", "replace"))
    os._exit(code)


@contextlib.contextmanager
def cleaned_up(cleanup: Callable[[], None]) -> Iterator[None]:
    """Run `cleanup`, which must not mind running twice, when the block ends or a signal ends the process in it."""
    _cleanups.append(cleanup)
    try:
        yield
    finally:
        cleanup()
        _cleanups.remove(cleanup)


def _terminal_modes() -> list[Any] | None:
    """Return the terminal's modes: line editing changes them, and a signal may end the process before it is done."""
    if termios is None:
        return None
    try:
        return termios.tcgetattr(0)
    except termios.error:
        return None


def _restore(modes: list[Any] | None) -> None:
    """Give the terminal its modes back, where it is this job's: the system stops a job in the background for that."""
    if termios is not None and modes is not None:
        with contextlib.suppress(termios.error, OSError):
            if os.tcgetpgrp(0) == os.getpgrp():
                termios.tcsetattr(0, termios.TCSANOW, modes)
