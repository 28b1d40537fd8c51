"""The inside of a `Cell`: takes jobs on standard input, one at a time, and ends when its parent does.

A request is its length and JSON, `[function, fields]`; a reply is a status, its length and its content: what the
function returns, or what it raised. The first reply, to no request, says that the module is imported. A job says itself
how much memory it may take (`allow_memory`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import struct
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from edge_run.base.error_codes import error_document
from edge_run.base.errors import EdgeRunError
from edge_run.base.units import MIB, format_size
from edge_run.runtime.processes.child_process import limit

REQUEST, REPLY = struct.Struct("<I"), struct.Struct("<BI")
DONE, FAILED, OVERRUN = 0, 1, 2
MOST_STACK_BYTES = 8 * MIB
MOST_FILE_BYTES = 16 * MIB
BYTES_OF_A_CHARACTER = 32  # what a job of ours may take for each of a long request

_allowed: list[int] = []  # the bytes that the job at hand may take; empty where no cell is


def main(module_name: str, lifeline: int) -> None:
    """Answer requests until standard input ends, or our parent, which holds the other end of `lifeline`."""
    _end_with_parent(lifeline)
    hears_interrupts = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which a service's manager sends to all: we end with our parent
    limit(CORE=0, FSIZE=MOST_FILE_BYTES, STACK=MOST_STACK_BYTES)
    with contextlib.suppress(AttributeError):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no reply
    _allowed.append(0)
    module = importlib.import_module(module_name)
    _write(replies, REPLY.pack(DONE, 0))
    while head := _read(REQUEST.size):
        (length,) = REQUEST.unpack(head)
        if length > MIB:
            allow_memory(BYTES_OF_A_CHARACTER * length)
        request = _read(length)
        if hears_interrupts:  # a Ctrl-C ends a job at once, also one that Python would not interrupt
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        status, content = _answer(module, request)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        del request
        _write(replies, REPLY.pack(status, len(content)) + content)
        del content


def run_job(module: ModuleType, job: str, fields: Mapping[str, Any]) -> bytes:
    """Return what the function `job` of `module` returns for `fields`."""
    return bytes(getattr(module, job)(**fields))


def is_cell() -> bool:
    """Return whether this process is a cell."""
    return bool(_allowed)


def allow_memory(more_bytes: int, most_bytes: int | None = None) -> None:
    """Let this process grow by so many bytes from here on; without effect where it is not a cell, or not Linux.

    most_bytes: what it may hold then in all, as `held_bytes` counts.
    """
    if not _allowed:
        return
    with contextlib.suppress(OSError, ValueError):
        held = held_bytes()
        most_bytes = held + more_bytes if most_bytes is None else min(held + more_bytes, most_bytes)
        _allowed[:] = [max(0, most_bytes - held)]
        limit(DATA=most_bytes)


def held_bytes() -> int:
    """Return what this process holds of what `allow_memory` bounds. Raises OSError, ValueError."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmData:"):
                return int(line.split()[1]) << 10
    raise ValueError("the system does not say how much memory a process holds")


def _answer(module: ModuleType, request: bytes) -> tuple[int, bytes]:
    try:
        job, fields = json.loads(request)
        return DONE, run_job(module, job, fields)
    except EdgeRunError as error:
        return FAILED, json.dumps(error_document(error)).encode()
    except MemoryError:
        pass  # and let go of what it held before anything is made
    return OVERRUN, f"takes more than {format_size(_allowed[0])} of memory".encode()


def _end_with_parent(lifeline: int) -> None:
    """Let the kernel end this process when the pipe `lifeline`, which nobody writes to, is closed by our parent.

    Python's own signal handlers, or a thread that waits, would come too late for a job that never lets them run.
    """
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _read(count: int) -> bytes:
    """Return so many bytes of standard input, or none at its end."""
    pieces = bytearray()
    while len(pieces) < count:
        piece = os.read(0, min(count - len(pieces), 1 << 20))
        if not piece:
            return b""
        pieces += piece
    return bytes(pieces)


def _write(target: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[os.write(target, rest) :]
        except BrokenPipeError:
            sys.exit(0)
