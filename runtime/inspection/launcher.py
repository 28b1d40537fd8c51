"""Starts the process that opens a model file first (`child.py`), waits for it, and says how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from edge_run.base.errors import Cancelled, KernelError, ModelFileError, NotSupported
from edge_run.runtime.processes.child_answer import read_answer, request_line
from edge_run.runtime.processes.child_process import (
    QUIET,
    end_child,
    how_ended,
    last_words,
    start_command,
    why_no_child,
)
from edge_run.tiers._libc import why_unavailable

LONGEST_S = 120
_START = "from edge_run.runtime.inspection.child import main; main()"
_LACKS_A_MODULE = (b"ModuleNotFoundError", b"ImportError")
_ADVICE = "the file is broken, or needs another llama.cpp; copy or download it again"


class NoInspector(NotSupported):
    """No process can be started to open a file first."""


def ask_child(path: Path, config: Mapping[str, object], *, is_tried: bool) -> str:
    """Return what the child says of the model at `path`, opened with the fields `config` of a ModelConfig.

    The child ends when we do. Raises what it says is to be raised, ModelFileError when it dies, NoInspector where it
    cannot be started, and Cancelled for a Ctrl-C that ended it only.
    """
    if reason := why_no_child() or why_unavailable():
        raise NoInspector(f"{path}: cannot be opened by a process of its own first: {reason}")
    try:
        code, output, notices = _run(request_line(path=path, config=config, is_tried=is_tried))
    except OSError as error:
        raise NoInspector(f"{path}: no process can be started to open it first: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ModelFileError(
            f"{path}: llama.cpp did not finish opening it in {LONGEST_S} s; check the drive, or {_ADVICE}"
        ) from error
    if code == 0 and (text := read_answer(output)) is not None:
        return text
    if code == -signal.SIGINT:
        raise Cancelled(f"{path}: opening it was stopped")
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        raise KernelError(
            f"{path}: the process that opens it first was ended from outside ({how_ended(code)}), perhaps for lack "
            "of memory; free some, and try again"
        )
    if code == 1 and any(name in notices for name in _LACKS_A_MODULE):
        raise NoInspector(f"{path}: the process that opens it first does not start{last_words(notices)}")
    raise ModelFileError(f"{path}: llama.cpp ended over it ({how_ended(code)}{last_words(notices)}); {_ADVICE}")


def _run(request: bytes) -> tuple[int, bytes, bytes]:
    """Return the child's exit code, output and notices; whatever ends the wait ends the child."""
    standard_input, ours = os.pipe()  # stays open while we live: the child ends when it is closed
    try:
        try:
            child = subprocess.Popen(
                start_command(_START),
                stdin=standard_input,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **QUIET},
            )
        finally:
            os.close(standard_input)
        try:
            os.write(ours, request)
            output, notices = child.communicate(timeout=LONGEST_S)
        finally:
            end_child(child)
            for stream in (child.stdout, child.stderr):
                if stream is not None:
                    stream.close()
        return child.returncode, output, notices
    finally:
        os.close(ours)
