"""A process of its own for what strangers wrote: chat templates, grammars and JSON schemas.

They are programs, which may take all memory, never end, or end the process that runs them. A `Cell` carries out the
jobs of one of our modules within limits of memory and time (`cell_child.py` is its inside). Waiting for it can be
interrupted: Ctrl-C and SIGTERM work while a job runs, and end it. Where this program cannot start another Python
(it is packed in one file, or the system is not POSIX) the jobs run here, without limits.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass
from typing import IO, Any

from edge_run.base.error_codes import error_of
from edge_run.base.errors import Cancelled, EdgeRunError, TierReadError, reason_of
from edge_run.runtime.processes.cell_child import DONE, OVERRUN, REPLY, REQUEST, run_job
from edge_run.runtime.processes.child_process import (
    QUIET,
    end_child,
    how_ended,
    last_words,
    start_command,
    why_no_child,
)

LONGEST_S = 10.0
_START = "from edge_run.runtime.processes.cell_child import main; main({!r}, {})"
STARTING_S = 120.0  # Python and a module, read from a drive that may be slow, and busy with weights


class Overrun(EdgeRunError):
    """A job reached a limit, or ended its process; the message continues a sentence: "takes more than 64 MiB"."""


class LostProcess(Overrun):
    """The process with what an earlier job left has ended before this one."""


@dataclass(frozen=True, slots=True)
class _Child:
    """A running process, and who started it: a fork of this process must not use or end it.

    lifeline: a pipe that is closed when we end, and the child with it.
    """

    process: subprocess.Popen[bytes]
    notices: IO[bytes]
    lifeline: int
    owner: int

    def end(self) -> None:
        if self.owner != os.getpid():
            return
        end_child(self.process)
        for stream in (self.process.stdin, self.process.stdout, self.notices):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        os.close(self.lifeline)


class Cell:
    """Carries out jobs of the module `module`, which has them as functions. Started when it is first needed.

    n_started: how many processes it has started: what a job left behind is lost with its process.

    Thread-safe: one job at a time. Close it, or leave it to the garbage collector.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self.n_started = 0
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._child: _Child | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def ask(self, job: str, limit_s: float = LONGEST_S, *, is_first: bool = True, **fields: Any) -> bytes:
        """Return what the function `job` of the module returns for `fields`, which JSON must be able to write.

        is_first: the job needs nothing of an earlier one, so that a process that has ended is started anew.
        Raises what the job raises of ours, Overrun for a limit reached, LostProcess where that of earlier jobs is gone,
        Cancelled for a Ctrl-C that ended the job only, TierReadError where no process can be started, TypeError or
        ValueError for fields that JSON cannot write.
        """
        return self.timed(job, limit_s, is_first=is_first, **fields)[0]

    def timed(
        self, job: str, limit_s: float = LONGEST_S, *, is_first: bool = True, **fields: Any
    ) -> tuple[bytes, float]:
        """Return what `ask` does, and how long the job took, in seconds, without the wait for other threads' jobs."""
        with self._lock:
            began_s = time.monotonic()
            content = self._exchanged(job, limit_s, fields, is_first=is_first)
            return content, time.monotonic() - began_s

    @property
    def is_asked(self) -> bool:
        """Whether a job is carried out, maybe for this thread, which then cannot ask for another one."""
        return self._lock.locked()

    def _exchanged(self, job: str, limit_s: float, fields: dict[str, Any], *, is_first: bool) -> bytes:
        if self._child is None and _why_here():
            return run_job(importlib.import_module(self._module), job, fields)
        request = json.dumps([job, fields]).encode()
        if not is_first and not self._is_alive():
            raise LostProcess("has lost its process")
        child = self._started()
        try:
            status, content = _exchange(child.process, request, time.monotonic() + limit_s)
        except TimeoutError:
            self._end()
            raise Overrun(f"takes longer than {limit_s:g} s") from None
        except (OSError, EOFError):
            raise self._ending(child) from None
        except BaseException:  # Ctrl-C: what the job does meanwhile is nobody's any more
            self._end()
            raise
        if status == DONE:
            return content
        if status == OVERRUN:
            raise Overrun(content.decode())
        raise error_of(json.loads(content))

    @property
    def is_alive(self) -> bool:
        """Whether a process runs, or none is needed."""
        return self._is_alive() or bool(_why_here())

    def close(self) -> None:
        """End the process. A later job starts another one. In a fork, whose lock may be held for ever, leave it be."""
        if self._owner == os.getpid() or self._is_alive():
            with self._lock:
                self._end()

    def _is_alive(self) -> bool:
        child = self._child
        return child is not None and child.owner == os.getpid() and child.process.poll() is None

    def _started(self) -> _Child:
        if self._child is not None and self._is_alive():
            return self._child
        self._end()
        try:
            self._child = _start(self._module)
            self.n_started += 1
        except OSError as error:  # which others would meet too: nothing is wrong with what was asked
            raise TierReadError(
                f"no process can be started for what strangers wrote ({reason_of(error)}); end other programs, or "
                "raise the limits (ulimit -n, ulimit -u)",
                errno=error.errno,
            ) from error
        self._finalizer = weakref.finalize(self, self._child.end)
        self._await_start(self._child)
        return self._child

    def _await_start(self, child: _Child) -> None:
        """Wait until a process says that it is ready, so that the limits of jobs are theirs alone."""
        try:
            _receive_reply(child.process, time.monotonic() + STARTING_S)
        except TimeoutError:
            self._end()
            raise TierReadError(
                f"the process for what strangers wrote has not started in {STARTING_S:g} s; check the drive"
            ) from None
        except (OSError, EOFError):
            raise self._ending(child) from None
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        self._child = None
        if self._finalizer is not None:
            self._finalizer()

    def _ending(self, child: _Child) -> EdgeRunError:
        """Return what the end of a process means that gave no answer, and forget it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(1.0)
        code = child.process.poll()
        words = b""
        with contextlib.suppress(OSError):
            child.notices.seek(0)
            words = child.notices.read(1 << 16)
        self._end()
        last = words.strip().rpartition(b"\n")[2]  # Python's own, where Ctrl-C came while the process began
        if code == -signal.SIGINT or (code == 1 and last.startswith(b"KeyboardInterrupt")):
            return Cancelled("stopped by Ctrl-C")
        return Overrun(f"ends the process that it runs in ({how_ended(code or 0)}{last_words(words)})")


def _start(module: str) -> _Child:
    with contextlib.ExitStack() as undo:
        notices = undo.enter_context(_notices_file())
        theirs, ours = os.pipe()
        undo.callback(os.close, ours)
        try:
            process = subprocess.Popen(
                start_command(_START.format(module, theirs)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=notices,
                env={**os.environ, **QUIET},
                bufsize=0,
                pass_fds=[theirs],
            )
        finally:
            os.close(theirs)
        undo.pop_all()
        return _Child(process, notices, ours, os.getpid())


def _notices_file() -> IO[bytes]:
    """Return a file for what a child says at its end; where none can be made, what it says is lost."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return open(os.devnull, "r+b")


def _why_here() -> str:
    """Return why jobs cannot have a process of their own."""
    return why_no_child() or ("" if os.name == "posix" else "this system is not POSIX")


def _exchange(process: subprocess.Popen[bytes], request: bytes, end_s: float) -> tuple[int, bytes]:
    """Send a request; return the status and the content of the reply. Raises TimeoutError, EOFError, OSError."""
    assert process.stdin is not None
    to_child = process.stdin.fileno()
    os.set_blocking(to_child, False)
    rest = memoryview(REQUEST.pack(len(request)) + request)
    while rest:
        _wait(to_child, select.POLLOUT, end_s)
        rest = rest[os.write(to_child, rest) :]
    return _receive_reply(process, end_s)


def _receive_reply(process: subprocess.Popen[bytes], end_s: float) -> tuple[int, bytes]:
    assert process.stdout is not None
    from_child = process.stdout.fileno()
    status, length = REPLY.unpack(_receive(from_child, REPLY.size, end_s))
    return status, _receive(from_child, length, end_s)


def _receive(source: int, count: int, end_s: float) -> bytes:
    pieces = bytearray()
    while len(pieces) < count:
        _wait(source, select.POLLIN, end_s)
        piece = os.read(source, min(count - len(pieces), 1 << 20))
        if not piece:
            raise EOFError
        pieces += piece
    return bytes(pieces)


def _wait(descriptor: int, event: int, end_s: float) -> None:
    """Wait until a pipe is ready. Raises TimeoutError, and KeyboardInterrupt at once."""
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
        raise TimeoutError
